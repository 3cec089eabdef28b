"""What one pool wants, were it alone: limits, hysteresis and pauses, but no budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import PoolObservation, Reason
from baton.autoscaler.state import PoolState
from cluster.config.worker import Role

OBJECTIVE_SECONDS = 120.0  # an objective is judged by what happened within this time
MAX_SHRINK = 0.34  # of a pool at a time
# Per decision, as a factor: measurements of an overloaded cluster exaggerate
MAX_GROWTH = 2


@dataclass(frozen=True)
class Need:
    """Replicas for the load (`now`), and for somewhat more than it (`safe`): a pool shrinks to the latter."""

    now: int
    safe: int
    reason: Reason  # why `now` is what it is
    missed: bool = False  # its objective, of late
    missed_reason: Reason = Reason.STEADY
    known: bool = True
    asked: bool = True  # a request has arrived since the last decision
    terms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Want:
    target: int
    reason: Reason


def want(
    config: AutoscalingConfig,
    role: Role,
    state: PoolState,
    seen: PoolObservation,
    need: Need,
    late: int,
    now: float,
) -> Want:
    """`late`: replicas that were asked for and should have come by now. Called once a decision: it also remembers since
    when more has been needed."""
    limits = config.pool(role)
    if state.busy_at is None:
        state.changed_at = now  # nothing is known of what was before: it counts like a change
    if need.asked or state.busy_at is None:
        state.busy_at = now
    most = max(_most(limits, state, seen, late, now), limits.min_replicas)
    least = max(limits.min_replicas, 1)
    if limits.min_replicas == 0 and config.scale_to_zero and now - state.busy_at > config.idle_seconds:
        least = 0
    state.note_need(now, max(need.safe, least), config.scale_down_seconds)
    if not limits.min_replicas <= seen.target <= limits.max_replicas:
        return Want(min(max(seen.target, limits.min_replicas), limits.max_replicas), Reason.LIMITS)
    if seen.target == 0 and least > 0 and need.asked:
        return Want(max(1, min(need.now, most)), Reason.WAKE)
    if not need.known and least > 0:
        return Want(seen.target, Reason.NO_DATA)
    if need.now > seen.target:
        return _grow(config, role, state, seen, need, most, now)
    state.more_since = None
    if need.missed:
        state.missed_at = now
        alone = seen.target < most and seen.ready >= seen.target
        # What came late before the last change could help says nothing of it.
        if alone and now - state.changed_at > limits.startup_seconds + OBJECTIVE_SECONDS:
            return Want(seen.target + 1, need.missed_reason)
        return Want(seen.target, Reason.STEADY)
    return _shrink(config, state, seen, least, now)


def _most(limits: PoolLimits, state: PoolState, seen: PoolObservation, late: int, now: float) -> int:
    """Nothing more is asked for while what was asked for does not come; after a pause, one is, to see."""
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
) -> Want:
    if state.more_since is None:
        state.more_since = now
    if most <= seen.target:
        reason = Reason.LIMITS if most >= config.pool(role).max_replicas else Reason.UNSCHEDULABLE
        return Want(seen.target, reason)
    if now - state.more_since < config.confirm_seconds:
        return Want(seen.target, Reason.STEADY)
    return Want(
        min(max(need.now, need.safe), most, max(MAX_GROWTH * seen.target, seen.target + 1)), need.reason
    )


def _shrink(
    config: AutoscalingConfig, state: PoolState, seen: PoolObservation, least: int, now: float
) -> Want:
    """Slowly, and never while an objective was missed within the same time."""
    low = max(state.most_needed, least)
    quiet = now - max(state.changed_at, state.missed_at) >= config.scale_down_seconds
    if low >= seen.target or not quiet:
        return Want(seen.target, Reason.STEADY)
    steps = max(1, math.floor(seen.target * MAX_SHRINK))
    return Want(max(low, seen.target - steps), Reason.LOW_LOAD)
