"""Counts the engines that one request has failed in, over all its attempts and choices.

The request itself may make engines fail, so the second failure ends it. Only errors that a worker reports count: a broken
connection, a silent worker or a dead process has many causes, and a request must survive more than two of those. Choices
that ran in one engine at the same time fail together: that is one failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from cluster.errors import (
    AttemptsExhaustedError,
    BatonError,
    EngineBusyError,
    EngineFailedError,
    EngineRequestError,
)
from cluster.membership.types import WorkerInfo

MAX_ENGINES = 2


class EngineFailures:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._may_be_cause = False  # whether the request may have made one of them fail
        self._failed_at: dict[str, float] = {}  # worker_id@epoch → time

    @property
    def names(self) -> frozenset[str]:
        """worker_id@epoch of each engine, excluded from the next placement."""
        return frozenset(self._failed_at)

    def note(self, worker: WorkerInfo, reason: BatonError, started: float) -> None:
        """Record the end of an attempt at `worker` that `started` then; ignores other reasons than an engine's failure.

        At the second failure raises AttemptsExhaustedError; EngineBusyError where both engines were too busy: the request
        is not the cause, and may be sent again later.
        """
        if not isinstance(reason, EngineRequestError | EngineFailedError) or not reason.retryable:
            return
        if started < self._failed_at.get(worker.name, -math.inf):
            return  # it ran there at the same time as the one that was counted
        self._failures += 1
        self._may_be_cause |= not isinstance(reason, EngineBusyError)
        self._failed_at[worker.name] = self._clock()
        if self._failures >= MAX_ENGINES:
            if not self._may_be_cause:
                raise reason
            raise AttemptsExhaustedError(
                f"the request failed in {MAX_ENGINES} engines and is not retried: {reason.public_text}",
                limit=str(MAX_ENGINES),
            )
