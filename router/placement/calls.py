"""Sequence numbers of a router's script calls, with which Redis applies a repeated or late call only once."""

from __future__ import annotations


class Calls:
    """Numbers of one run. Redis assigns `run` at start (0 before that); calls of an earlier run of the same router name
    are void."""

    def __init__(self, run: int = 0) -> None:
        self.restart(run)

    def restart(self, run: int) -> None:
        self.run = run
        self._next = 1
        self._awaited: set[int] = set()
        self._settled = 0

    def begin(self) -> int:
        """Begin a placement; returns its number, to be passed to `end`."""
        number, self._next = self._next, self._next + 1
        self._awaited.add(number)
        return number

    def end(self, number: int) -> None:
        self._awaited.discard(number)

    def settle(self) -> tuple[int, int, int]:
        """(run, number of the next table, oldest placement still awaited).

        The table contains every older placement that has not ended, so Redis charges no older one that arrives late.
        """
        self._settled += 1
        return self.run, self._settled, min(self._awaited, default=self._next)
