"""The two ways in which a request is answered: by the ASGI application, and directly, as generations are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from router.frontends.http.connection.exchange import Endpoint

CYCLES = ("asgi", "direct")


class EveryRequest(Mapping[tuple[str, str], Endpoint]):
    """The same endpoint for every method and path."""

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    def __getitem__(self, key: tuple[str, str]) -> Endpoint:
        return self._endpoint

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def __len__(self) -> int:
        return 0
