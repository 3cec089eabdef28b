"""Replicas that were asked for and do not come: noticed, given back, and asked for again later."""

from __future__ import annotations

from baton.autoscaling.config import AutoscalingConfig, PoolLimits
from baton.autoscaling.observation import PoolObservation
from baton.autoscaling.state import FOREVER_AGO, PoolState

MAX_RETRY_SECONDS = 3600.0
SURE_SECONDS = 60.0  # for so long a platform's word that a replica fits nowhere must hold


def watch(limits: PoolLimits, state: PoolState, seen: PoolObservation, now: float) -> int:
    """Keeps count of replicas on their way. Returns how many of them are late."""
    if state.target is not None and seen.target != state.target:
        state.changed_at = now  # by somebody else: it counts like one of our own changes
    if seen.ready >= seen.target:
        state.pending_since = None
        if seen.target > state.cap:
            state.retry_seconds, state.given_back_at = 0.0, FOREVER_AGO
    elif state.pending_since is None or seen.ready > state.ready or seen.target > (state.target or 0):
        state.pending_since = now
    state.ready, state.target = seen.ready, seen.target
    if state.pending_since is None:
        return 0
    waited = now - state.pending_since
    late = waited > limits.startup_seconds or (seen.unschedulable > 0 and waited > SURE_SECONDS)
    return seen.target - seen.ready if late else 0


def give_back(
    config: AutoscalingConfig, limits: PoolLimits, state: PoolState, seen: PoolObservation, now: float
) -> int | None:
    """The target without replicas that have not come for too long; None while there is still hope."""
    if state.pending_since is None:
        return None
    waited = now - state.pending_since
    hopeless = waited > limits.startup_seconds + config.unschedulable_seconds
    hopeless = hopeless or (seen.unschedulable > 0 and waited > max(SURE_SECONDS, limits.startup_seconds))
    least = max(seen.ready, limits.min_replicas, 1)
    if not hopeless or least >= seen.target:
        return None
    state.given_back_at = now
    state.retry_seconds = min(max(config.retry_seconds, 2 * state.retry_seconds), MAX_RETRY_SECONDS)
    state.cap = least
    state.pending_since = None
    return least
