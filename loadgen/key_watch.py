"""Ends a run in which no request can be answered, because the servers refuse the API key."""

from __future__ import annotations

from collections.abc import Iterable

from loadgen.record import Failure

_KINDS = frozenset({"http_401", "grpc_unauthenticated", "UnauthenticatedError"})


class KeyRefused(Exception):
    """Each server refused the API key, or that there is none. The text is a server's."""


class KeyWatch:
    """What became of a run's requests, as far as the key is concerned."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._untried = set(addresses)
        self._all_refused = True
        self._message: str | None = None  # the last failure's

    def note(self, address: str, failure: Failure | None) -> None:
        """A request to `address` has ended. Raises KeyRefused if each address has refused one for its key, and none has
        ended otherwise."""
        self._untried.discard(address)
        self._all_refused &= failure is not None and failure.kind in _KINDS
        if failure is not None:
            self._message = failure.message
        if not self._untried:
            self.check()

    def check(self) -> None:
        """Raises KeyRefused if all requests so far were refused for their key."""
        if self._all_refused and self._message is not None:
            raise KeyRefused(self._message)
