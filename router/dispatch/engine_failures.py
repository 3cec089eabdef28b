"""Counts the engines that one request has failed in, over all its attempts and choices.

The request itself may make engines fail, so the second failure ends it. Only errors that a worker reports count: a broken
connection, a silent worker or a dead process has many causes, and a request must survive more than two of those.
"""

from __future__ import annotations

from cluster.errors import AttemptsExhaustedError, BatonError, EngineFailedError, EngineRequestError
from cluster.membership.types import WorkerInfo

MOST_ENGINES = 2


class EngineFailures:
    def __init__(self) -> None:
        self._failures = 0
        self.names: frozenset[str] = frozenset()  # worker_id@epoch, excluded from the next placement

    def note(self, worker: WorkerInfo, reason: BatonError) -> None:
        """Record the end of an attempt at `worker`; ignores other reasons than an engine's failure.

        Raises AttemptsExhaustedError at the second failure.
        """
        if not isinstance(reason, EngineRequestError | EngineFailedError):
            return
        self._failures += 1
        self.names |= {worker.name}
        if self._failures >= MOST_ENGINES:
            raise AttemptsExhaustedError(
                f"the request failed in {MOST_ENGINES} engines and is not retried: {reason.message}",
                limit=str(MOST_ENGINES),
            )
