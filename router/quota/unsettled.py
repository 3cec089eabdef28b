"""A bounded queue of settlements that Redis has not acknowledged; they are repeated, and Redis applies each once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_KEPT = 10_000
KEPT_SECONDS = 60.0  # less than APPLIED_MS (records.lua), for which Redis recognises a repetition

T = TypeVar("T")


class Unsettled(Generic[T]):
    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._waiting: deque[tuple[float, T]] = deque()
        self.dropped = 0  # too many or too old: their tenants remain charged in full

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, settlement: T) -> None:
        self._waiting.append((self._clock(), settlement))
        if len(self._waiting) > MAX_KEPT:
            self._waiting.popleft()
            self.dropped += 1

    def oldest(self) -> T | None:
        """The oldest settlement that is not too old, or None; it stays queued until `done`."""
        while self._waiting and self._clock() - self._waiting[0][0] > KEPT_SECONDS:
            self._waiting.popleft()
            self.dropped += 1
        return self._waiting[0][1] if self._waiting else None

    def done(self, settlement: T) -> None:
        if self._waiting and self._waiting[0][1] is settlement:
            self._waiting.popleft()
