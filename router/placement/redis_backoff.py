"""When Redis is called again after it did not answer.

After a pause one call probes it; all others go on without Redis until the probe is answered. The pause is random, so that
routers that lost Redis at the same moment do not return at the same moment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable


class RedisBackoff:
    def __init__(
        self,
        seconds: float,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._rng = rng or random.Random()
        self._clock = clock
        self._until = 0.0  # 0: the last call was answered

    def may_ask(self) -> bool:
        """Whether to call Redis now; after a failure True once per pause, for the caller that probes it."""
        if self._until == 0.0:
            return True
        if self._clock() < self._until:
            return False
        # Another call may probe after the next pause, even if this one is cancelled and reports nothing.
        self.failed()
        return True

    @property
    def is_failing(self) -> bool:
        """Whether the last call was not answered."""
        return self._until != 0.0

    def answered(self) -> None:
        self._until = 0.0

    def failed(self) -> None:
        self._until = self._clock() + self._seconds * self._rng.uniform(0.5, 1.0)
