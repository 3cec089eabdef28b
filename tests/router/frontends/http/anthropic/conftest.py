"""The router in front of scripted answers, whose calls are parsed."""

from __future__ import annotations

import httpx
import pytest

from tests.router.frontends.http.responses.conftest import scripted

__all__ = ["scripted"]


@pytest.fixture(scope="module")
def client(scripted):
    with httpx.Client(base_url=scripted.url.removesuffix("/v1"), timeout=60) as made:
        yield made
