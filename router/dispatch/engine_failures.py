"""Which engines one request has failed in, over all its attempts and choices.

A request may itself be what an engine fails of: the second failure ends it, and no third engine sees it. Only a worker's
own word counts. A connection that broke, a silent worker or a dead process says nothing about the request: those are
lost for many reasons, and a request must outlive more than two of them.
"""

from __future__ import annotations

from cluster.errors import AttemptsExhaustedError, BatonError, EngineFailedError, EngineRequestError
from cluster.membership.types import WorkerInfo

MOST_ENGINES = 2


class EngineFailures:
    def __init__(self) -> None:
        self._failures = 0
        self.names: frozenset[str] = frozenset()  # of the workers' lives: the request is placed without them

    def note(self, worker: WorkerInfo, reason: BatonError) -> None:
        """How an attempt ended at `worker`, if that was its engine's failure. Raises AttemptsExhaustedError at the
        second."""
        if not isinstance(reason, EngineRequestError | EngineFailedError):
            return
        self._failures += 1
        self.names |= {worker.name}
        if self._failures >= MOST_ENGINES:
            raise AttemptsExhaustedError(
                f"the request failed in {MOST_ENGINES} engines and is not tried in another: {reason.message}",
                limit=str(MOST_ENGINES),
            )
