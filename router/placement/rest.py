"""When Redis may be asked again after it did not answer.

After the pause one call tries it; the others go on without it until that one was answered. Routers that lost it at the
same moment come back at different ones.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class Rest:
    def __init__(
        self,
        seconds: float,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._rng = rng or random.Random()
        self._clock = clock
        self._until = 0.0  # 0: it answered last time

    def may_ask(self) -> bool:
        """True once a pause until Redis has answered: who gets it makes the call."""
        if self._until == 0.0:
            return True
        if self._clock() < self._until:
            return False
        # Another call may try after the next pause, also where this one is cancelled and reports nothing.
        self.failed()
        return True

    def answered(self) -> None:
        self._until = 0.0

    def failed(self) -> None:
        self._until = self._clock() + self._seconds * self._rng.uniform(0.5, 1.0)
