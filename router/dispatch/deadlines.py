"""How soon a request wants its first token, and how long it may wait before it is told that it waits in vain."""

from __future__ import annotations

import time
from dataclasses import dataclass

from cluster.config.router import RouterConfig
from router.placement.types import PriorityClass, priority_class_of
from router.request.completion import Completion

OF_DEADLINE = 0.9  # of a client's own deadline: the refusal must still reach it
LAST_SECONDS = 1.0


@dataclass(frozen=True)
class RequestDeadlines:
    config: RouterConfig
    completion: Completion
    received: float  # monotonic seconds

    @property
    def priority_class(self) -> PriorityClass:
        return priority_class_of(self.completion.priority)

    @property
    def target_seconds(self) -> float:
        """Of its class; 0 = no target."""
        return {
            "high": self.config.ttft_target_seconds_high,
            "normal": self.config.ttft_target_seconds_normal,
            "batch": self.config.ttft_target_seconds_batch,
        }[self.priority_class]

    @property
    def left_seconds(self) -> float:
        return max(1e-3, self.received + self.completion.deadline_seconds - time.monotonic())

    @property
    def admission_seconds(self) -> float:
        """How long it may wait for a place: as long as its class's target lets it queue, and ended sooner than its
        deadline would end it, so that it is told why."""
        patience = max(self.config.admission_seconds, self.target_seconds)
        return min(patience, OF_DEADLINE * self.completion.deadline_seconds)

    def worker_seconds(self, deadline: float) -> float:
        """How long a worker may take to find it a place. A late attempt gets a second of its own, but no longer than
        leaves time to say that it was in vain."""
        return max(deadline - time.monotonic(), min(LAST_SECONDS, OF_DEADLINE * self.left_seconds))
