"""The target size of one pool by itself: limits, hysteresis and pauses, without the GPU budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.autoscaler.activity import OBJECTIVE_SECONDS
from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import PoolObservation, Reason
from baton.autoscaler.state import PoolState
from cluster.config.worker import Role

MAX_SHRINK = 0.34  # of a pool at a time
# Factor per decision: measurements of an overloaded cluster overestimate the need
MAX_GROWTH = 2


@dataclass(frozen=True)
class Need:
    """Replicas for the present load (`now`), and for that load and scale_down_margin more (`safe`), to which a pool
    shrinks."""

    now: int
    safe: int
    reason: Reason  # of `now`
    missed: bool = False  # the objective was missed within OBJECTIVE_SECONDS
    missed_reason: Reason = Reason.STEADY
    known: bool = True
    asked: bool = True  # a request has arrived since the last decision
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PoolTarget:
    target: int
    reason: Reason


def pool_target(
    config: AutoscalingConfig,
    role: Role,
    state: PoolState,
    seen: PoolObservation,
    need: Need,
    late: int,
    now: float,
) -> PoolTarget:
    """The pool's next size, with the reason. Called once per decision, because it also updates `state`: since when more
    replicas have been needed, and when the objective was last missed.

    `late`: requested replicas that have not started within `startup_seconds`.
    """
    limits = config.pool(role)
    if state.busy_at is None:
        state.changed_at = now  # the first decision: earlier changes are unknown, so it counts as one
    if need.asked or state.busy_at is None:
        state.busy_at = now
    most = max(_most(limits, state, seen, late, now), limits.min_replicas)
    least = max(limits.min_replicas, 1)
    if limits.min_replicas == 0 and config.scale_to_zero and now - state.busy_at > config.idle_seconds:
        least = 0
    state.note_need(now, max(need.safe, least), config.scale_down_seconds)
    if not limits.min_replicas <= seen.target <= limits.max_replicas:
        return PoolTarget(min(max(seen.target, limits.min_replicas), limits.max_replicas), Reason.LIMITS)
    if seen.target == 0 and least > 0 and need.asked:
        return PoolTarget(max(1, min(need.now, most)), Reason.WAKE)
    if not need.known and least > 0:
        return PoolTarget(seen.target, Reason.NO_DATA)
    if need.now > seen.target:
        return _grow(config, role, state, seen, need, most, now)
    state.more_since = None
    if need.missed:
        state.missed_at = now
        alone = seen.target < most and seen.ready >= seen.target
        # First tokens that were late before the last change could take effect do not count against it.
        if alone and now - state.changed_at > limits.startup_seconds + OBJECTIVE_SECONDS:
            return PoolTarget(seen.target + 1, need.missed_reason)
        return PoolTarget(seen.target, Reason.STEADY)
    return _shrink(config, state, seen, least, now)


def _most(limits: PoolLimits, state: PoolState, seen: PoolObservation, late: int, now: float) -> int:
    """The largest size that may be requested. While requested replicas do not start, no more are requested; after a pause
    one is, as a trial."""
    most = limits.max_replicas
    if late > 0:
        most = min(most, seen.target)
    if state.retry_seconds > 0:
        most = min(most, state.cap if state.blocked(now) else state.cap + 1)
    return most


def _grow(
    config: AutoscalingConfig,
    role: Role,
    state: PoolState,
    seen: PoolObservation,
    need: Need,
    most: int,
    now: float,
) -> PoolTarget:
    if state.more_since is None:
        state.more_since = now
    if most <= seen.target:
        reason = Reason.LIMITS if most >= config.pool(role).max_replicas else Reason.UNSCHEDULABLE
        return PoolTarget(seen.target, reason)
    if now - state.more_since < config.confirm_seconds:
        return PoolTarget(seen.target, Reason.STEADY)
    return PoolTarget(
        min(max(need.now, need.safe), most, max(MAX_GROWTH * seen.target, seen.target + 1)), need.reason
    )


def _shrink(
    config: AutoscalingConfig, state: PoolState, seen: PoolObservation, least: int, now: float
) -> PoolTarget:
    """At most MAX_SHRINK of the pool at a time, and only if neither the target changed nor the objective was missed within
    `scale_down_seconds`."""
    low = max(state.most_needed, least)
    quiet = now - max(state.changed_at, state.missed_at) >= config.scale_down_seconds
    if low >= seen.target or not quiet:
        return PoolTarget(seen.target, Reason.STEADY)
    steps = max(1, math.floor(seen.target * MAX_SHRINK))
    return PoolTarget(max(low, seen.target - steps), Reason.LOW_LOAD)
