"""Counts of what holders have taken: in this process, or in all processes of a router (router/processes/tallies.py)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

ALL = ""  # the one holder of a tally that counts without telling holders apart


class Tally(Protocol):
    def add(self, holder: str, count: int) -> int:
        """Add to what a holder has taken. Returns what it has now, in all processes."""

    def here(self, holder: str) -> int:
        """The holder's use in this process."""

    def total(self, holder: str) -> int:
        """The holder's use in all processes."""

    def __len__(self) -> int:
        """Holders that have taken something in this process; others use no memory."""


class LocalTally:
    """For a router of one process."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}

    def add(self, holder: str, count: int) -> int:
        taken = self._taken.get(holder, 0) + count
        if taken:
            self._taken[holder] = taken
        else:
            self._taken.pop(holder, None)
        return taken

    def here(self, holder: str) -> int:
        return self._taken.get(holder, 0)

    total = here

    def __len__(self) -> int:
        return len(self._taken)


class Tallies(NamedTuple):
    """Counts for the limits of a whole router: requests in flight and bytes of their bodies, of all and by tenant."""

    requests: Tally
    tenant_requests: Tally
    bytes: Tally
    tenant_bytes: Tally


def local_tallies() -> Tallies:
    return Tallies(LocalTally(), LocalTally(), LocalTally(), LocalTally())
