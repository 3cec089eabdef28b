"""How soon a request needs its first token, and how long it may wait before it is refused."""

from __future__ import annotations

import time

from cluster.config.router import RouterConfig
from cluster.errors import DeadlineError
from cluster.protocol.priority import class_of
from router.request.completion import Completion

OF_DEADLINE = 0.9  # of a client's own deadline: the refusal must still reach it
LAST_SECONDS = 1.0


class RequestDeadlines:
    def __init__(self, config: RouterConfig, completion: Completion, began: float):
        """`began`: monotonic seconds, from which the request's own deadline counts: its dispatch, not its arrival.
        A gRPC client's is what was left of it once the prompt was tokenised."""
        self.priority_class = class_of(completion.priority)
        # TTFT target of the request's class; 0 = no target
        self.target_seconds = {
            "high": config.ttft_target_seconds_high,
            "normal": config.ttft_target_seconds_normal,
            "batch": config.ttft_target_seconds_batch,
        }[self.priority_class]
        self._config, self._seconds = config, completion.deadline_seconds
        self._began = began

    @property
    def left_seconds(self) -> float:
        return max(1e-3, self._began + self._seconds - time.monotonic())

    @property
    def admission_seconds(self) -> float:
        """How long it may wait for a worker: as long as the target of its class allows, but less than its own deadline, so
        that the refusal and its reason still reach the client."""
        longest = max(self._config.admission_seconds, self.target_seconds)
        return min(longest, OF_DEADLINE * self._seconds)

    def missed(self) -> DeadlineError:
        """The error of a request that is not finished in time."""
        return DeadlineError(f"not finished within {self._seconds:.1f} s", field="deadline")

    def worker_seconds(self, deadline: float) -> float:
        """How long it may queue at a worker. A late attempt gets a second of its own, but no longer than leaves time to
        tell the client that it failed."""
        return max(deadline - time.monotonic(), min(LAST_SECONDS, OF_DEADLINE * self.left_seconds))
