"""The router in front of scripted answers, whose calls are parsed."""

from tests.router.frontends.http.responses.conftest import scripted

__all__ = ["scripted"]
