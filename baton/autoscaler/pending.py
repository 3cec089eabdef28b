"""Requested replicas that do not start: detected, given up, and requested again later."""

from __future__ import annotations

from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import PoolObservation
from baton.autoscaler.state import FOREVER_AGO, PoolState

MAX_RETRY_SECONDS = 3600.0
SURE_SECONDS = 60.0  # how long a platform must report a replica as unschedulable
MAX_STARTING_SECONDS = 3600.0  # how long a replica may be reported as starting
# In multiples of the configured start-up time: a worker that was absent for a day did not take a day to start
MAX_LEARNED = 4.0


def watch(limits: PoolLimits, state: PoolState, seen: PoolObservation, now: float) -> int:
    """Track starting replicas. Returns how many are overdue."""
    if state.target is not None and seen.target != state.target:
        state.changed_at = now  # changed from outside: counts like a change by the policy
    _learn(state, seen, now)
    restarted = False
    if seen.ready >= seen.target:
        state.pending_since = None
        if seen.target > state.cap:
            state.retry_seconds, state.given_back_at = 0.0, FOREVER_AGO
    elif state.pending_since is None or seen.ready > state.ready or seen.target > (state.target or 0):
        state.pending_since, restarted = now, True
    state.waited_for_place = seen.unschedulable > 0 or (state.waited_for_place and not restarted)
    state.ready, state.target = seen.ready, seen.target
    if state.pending_since is None:
        return 0
    waited = now - state.pending_since
    late = waited > _startup(limits, state) or (seen.unschedulable > 0 and waited > SURE_SECONDS)
    return max(0, seen.target - seen.ready - _starting(seen, waited)) if late else 0


def give_back(
    config: AutoscalingConfig, limits: PoolLimits, state: PoolState, seen: PoolObservation, now: float
) -> int | None:
    """Return the target without replicas that are overdue for too long; None if there are none."""
    if state.pending_since is None:
        return None
    waited = now - state.pending_since
    hopeless = waited > _startup(limits, state) + config.unschedulable_seconds
    hopeless = hopeless or (seen.unschedulable > 0 and waited > max(SURE_SECONDS, limits.startup_seconds))
    least = max(seen.ready + _starting(seen, waited), limits.min_replicas, 1)
    if not hopeless or least >= seen.target:
        return None
    state.given_back_at = now
    state.retry_seconds = min(max(config.retry_seconds, 2 * state.retry_seconds), MAX_RETRY_SECONDS)
    state.cap = least
    state.pending_since = None
    return least


def _starting(seen: PoolObservation, waited: float) -> int:
    """A scheduled replica keeps its place while it loads, however late: a new one would load as long."""
    return min(seen.starting, seen.target - seen.ready) if waited <= MAX_STARTING_SECONDS else 0


def _startup(limits: PoolLimits, state: PoolState) -> float:
    """Start-up seconds, as configured or observed."""
    return max(limits.startup_seconds, min(state.start_seconds, MAX_LEARNED * limits.startup_seconds))


def _learn(state: PoolState, seen: PoolObservation, now: float) -> None:
    """Update the observed start-up time: slow starts count at once, quick ones gradually, waiting for a node never."""
    if state.pending_since is None or seen.ready <= state.ready:
        return
    if state.waited_for_place or seen.unschedulable > 0:
        return
    took = now - state.pending_since
    state.start_seconds = max(took, 0.9 * state.start_seconds)
