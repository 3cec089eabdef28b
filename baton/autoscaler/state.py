"""State of the policy between decisions. Targets are kept by the platform and read from it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.autoscaler.activity import ActivityHistory
from baton.autoscaler.decode_demand import StepModel
from cluster.config.worker import Role

FOREVER_AGO = float("-inf")


@dataclass
class PoolState:
    activity: ActivityHistory = field(default_factory=ActivityHistory)
    target: int | None = None  # of the last decision
    changed_at: float = FOREVER_AGO
    more_since: float | None = None  # since when more is needed continuously
    missed_at: float = FOREVER_AGO  # the last time its objective was missed
    busy_at: float | None = None  # the last time there was a request
    lows: deque[tuple[float, int]] = field(default_factory=deque)  # (time, replicas needed), decreasing
    # Requested replicas that have not started:
    ready: int = 0
    pending_since: float | None = None
    waited_for_place: bool = False  # since then
    start_seconds: float = 0.0  # what replicas of late took to come, or a little more; 0: none has
    given_back_at: float = FOREVER_AGO
    retry_seconds: float = 0.0  # 0: nothing was given back
    cap: int = 0  # while it may not be asked for more

    def note_need(self, now: float, needed: int, keep_seconds: float) -> None:
        while self.lows and self.lows[-1][1] <= needed:
            self.lows.pop()
        self.lows.append((now, needed))
        while self.lows[0][0] < now - keep_seconds:
            self.lows.popleft()

    @property
    def most_needed(self) -> int:
        """Within the time that `note_need` keeps."""
        return self.lows[0][1]

    def blocked(self, now: float) -> bool:
        return now < self.given_back_at + self.retry_seconds


@dataclass
class PolicyState:
    """One per policy, which alone writes it."""

    decided_at: float | None = None  # the last time
    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    step_model: StepModel = field(default_factory=StepModel)
    moved_at: float = FOREVER_AGO  # when a replica was last taken from one pool for the other

    def pool(self, role: Role) -> PoolState:
        return self.prefill if role == "prefill" else self.decode
