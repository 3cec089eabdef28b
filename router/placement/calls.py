"""Numbers for a router's script calls: Redis applies each once, also when it is repeated or comes late."""

from __future__ import annotations


class Calls:
    """`run` names this life of the router, given out by Redis: what an earlier life under the same name sent is void.
    0: Redis has not given one yet."""

    def __init__(self, run: int = 0) -> None:
        self.restart(run)

    def restart(self, run: int) -> None:
        self.run = run
        self._next = 1
        self._awaited: set[int] = set()
        self._settled = 0

    def begin(self) -> int:
        """The number of a placement, until `end`."""
        number, self._next = self._next, self._next + 1
        self._awaited.add(number)
        return number

    def end(self, number: int) -> None:
        self._awaited.discard(number)

    def settle(self) -> tuple[int, int, int]:
        """Run, number of the table as it is now, and the oldest placement that is still awaited: the table holds every
        older one that is not over, and Redis charges none of them any more."""
        self._settled += 1
        return self.run, self._settled, min(self._awaited, default=self._next)
