"""Ends a run in which no request can be answered, because the servers refuse the API key."""

from __future__ import annotations

from collections.abc import Iterable

from loadgen.record import Failure

_KINDS = frozenset({"http_401", "grpc_unauthenticated", "UnauthenticatedError"})

Use = tuple[str, str]  # an address, and the key of requests to it
# Of each of these, before a run ends early: one may be of a server that has not read the newest keys yet.
REFUSALS = 3


class KeyRefused(Exception):
    """Every server refused the API key, or requests without one. The text is a server's."""


class KeyWatch:
    """Detects that all requests of a run fail because of the API key."""

    def __init__(self, used: Iterable[Use]) -> None:
        self._refusals = dict.fromkeys(used, 0)
        self._all_refused = True
        self._ended = False  # by `note`: what ends later changes nothing
        self._message = ""  # of the last refusal

    def note(self, use: Use, failure: Failure | None) -> None:
        """A request has ended. Raises KeyRefused if each address has refused REFUSALS of each key used there, and none has
        ended otherwise."""
        self._all_refused &= failure is not None and failure.kind in _KINDS
        if not self._all_refused or failure is None:
            return
        self._refusals[use] += 1
        self._message = failure.message
        if min(self._refusals.values()) >= REFUSALS:
            self._ended = True
            self.check()

    def check(self) -> None:
        """Raises KeyRefused if `note` has, or if all requests were refused for their key."""
        if self._ended or (self._all_refused and any(self._refusals.values())):
            raise KeyRefused(self._message)
