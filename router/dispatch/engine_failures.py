"""Which engines one request has failed in, over all its attempts and choices.

A request may itself be what an engine fails of: the second failure ends it, and no third engine sees it. Only a worker's
own word counts. A connection that broke, a silent worker or a dead process says nothing about the request: those are
lost for many reasons, and a request must outlive more than two of them. Choices that ran beside each other in one engine
fail with it together: that is one failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cluster.errors import AttemptsExhaustedError, BatonError, EngineFailedError, EngineRequestError
from cluster.membership.types import WorkerInfo

MOST_ENGINES = 2


class EngineFailures:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at: dict[str, float] = {}  # by the worker's life

    @property
    def names(self) -> frozenset[str]:
        """Of the workers' lives: the request is placed without them."""
        return frozenset(self._failed_at)

    def note(self, worker: WorkerInfo, reason: BatonError, started: float) -> None:
        """How an attempt that `started` then ended at `worker`, if that was its engine's failure. Raises
        AttemptsExhaustedError at the second."""
        if not isinstance(reason, EngineRequestError | EngineFailedError):
            return
        if started < self._failed_at.get(worker.name, -math.inf):
            return  # it ran there beside the one that is counted
        self._failures += 1
        self._failed_at[worker.name] = self._clock()
        if self._failures >= MOST_ENGINES:
            raise AttemptsExhaustedError(
                f"the request failed in {MOST_ENGINES} engines and is not tried in another: {reason.message}",
                limit=str(MOST_ENGINES),
            )
