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
class _Exclusion:
    until: float  # by the clock
    seconds: float  # its length


class Backoff(Generic[Name]):
    """Exclusions by name. A name that has not failed for MAX_SECONDS after one starts again at FIRST_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._exclusions: dict[Name, _Exclusion] = {}

    def failed(self, name: Name) -> bool:
        """Exclude the name. Returns False if it is excluded already: calls in flight at the first failure count with
        it."""
        now = self._clock()
        recent = {one: its for one, its in self._exclusions.items() if now < its.until + MAX_SECONDS}
        self._exclusions = recent
        known = recent.get(name)
        if known is not None and now < known.until:
            return False
        seconds = FIRST_SECONDS if known is None else min(2 * known.seconds, MAX_SECONDS)
        self._exclusions[name] = _Exclusion(now + seconds, seconds)
        return True

    def failed_again(self, name: Name) -> None:
        """Record a failure that extends an exclusion but does not begin one."""
        if name in self._exclusions:
            self.failed(name)

    def answered(self, name: Name) -> None:
        """End the exclusion, and forget how long it was."""
        self._exclusions.pop(name, None)

    def names(self) -> frozenset[Name]:
        """Names that are excluded now."""
        if not self._exclusions:
            return frozenset()
        now = self._clock()
        return frozenset(name for name, its in self._exclusions.items() if now < its.until)
