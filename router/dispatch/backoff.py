"""Who could not be reached is left alone for a while, each time for twice as long, and then tried again.

Without it every request that is sent there finds out for itself, and waits for seconds each time, for as long as a
partition lasts. It only says who is not to be tried now: where nobody else is there, placement tries all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")
FIRST_SECONDS = 1.0
MOST_SECONDS = 16.0


@dataclass(frozen=True)
class _Out:
    until: float
    seconds: float  # how long it is out this time


class Backoff(Generic[Name]):
    """Of anything that has a name. Who has not failed for MOST_SECONDS after its time begins anew."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._out: dict[Name, _Out] = {}

    def failed(self, name: Name) -> bool:
        """Whether that is news: what was under way with the first failure may fail later, and counts once."""
        now = self._clock()
        self._out = {one: out for one, out in self._out.items() if now < out.until + MOST_SECONDS}
        known = self._out.get(name)
        if known is not None and now < known.until:
            return False
        seconds = FIRST_SECONDS if known is None else min(2 * known.seconds, MOST_SECONDS)
        self._out[name] = _Out(now + seconds, seconds)
        return True

    def failed_again(self, name: Name) -> None:
        """Only if it had failed before: this alone is no reason."""
        if name in self._out:
            self.failed(name)

    def answered(self, name: Name) -> None:
        self._out.pop(name, None)

    def names(self) -> frozenset[Name]:
        """Who is not to be tried now."""
        now = self._clock()
        return frozenset(name for name, out in self._out.items() if now < out.until)
