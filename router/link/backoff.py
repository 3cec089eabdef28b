"""Exponential back-off: a name that failed is excluded, each time for twice as long, and then tried again.

Without it every request sent to an unreachable worker waits for seconds, for as long as a partition lasts. The exclusion
is a preference: where no other worker is left, placement tries the worker all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")
FIRST_SECONDS = 1.0
MAX_SECONDS = 16.0


@dataclass(frozen=True)
class _Out:
    until: float
    seconds: float  # length of this exclusion


class Backoff(Generic[Name]):
    """By name. A name that has not failed for MAX_SECONDS after its exclusion starts again at FIRST_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._out: dict[Name, _Out] = {}

    def failed(self, name: Name) -> bool:
        """False while the name is excluded already: calls in flight at the first failure count with it."""
        now = self._clock()
        self._out = {one: out for one, out in self._out.items() if now < out.until + MAX_SECONDS}
        known = self._out.get(name)
        if known is not None and now < known.until:
            return False
        seconds = FIRST_SECONDS if known is None else min(2 * known.seconds, MAX_SECONDS)
        self._out[name] = _Out(now + seconds, seconds)
        return True

    def failed_again(self, name: Name) -> None:
        """Record a failure that extends an exclusion but does not begin one."""
        if name in self._out:
            self.failed(name)

    def answered(self, name: Name) -> None:
        self._out.pop(name, None)

    def names(self) -> frozenset[Name]:
        """Names that are excluded now."""
        if not self._out:
            return frozenset()
        now = self._clock()
        return frozenset(name for name, out in self._out.items() if now < out.until)
