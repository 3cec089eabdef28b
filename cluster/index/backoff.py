"""Exponential back-off of a worker that keeps losing its slot in the index.

Each new slot costs a registration and a report of its whole cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

FIRST_SECONDS = 1.0
MAX_SECONDS = 32.0


class SlotBackoff:
    """The first new slot is requested at once, later ones after pauses that double up to MAX_SECONDS. Pauses have jitter,
    because many workers may lose their slots at the same moment.

    A slot that is kept for MAX_SECONDS after its pause resets the pauses."""

    def __init__(self, rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic):
        self._rng = rng or random.Random()
        self._clock = clock
        self._until = clock() - 2 * MAX_SECONDS
        self._seconds = FIRST_SECONDS

    def may_ask(self) -> bool:
        return self._clock() >= self._until

    def asked(self) -> None:
        now = self._clock()
        if now > self._until + MAX_SECONDS:
            self._seconds = FIRST_SECONDS
        self._until = now + self._seconds * self._rng.uniform(0.5, 1.0)
        self._seconds = min(2 * self._seconds, MAX_SECONDS)
