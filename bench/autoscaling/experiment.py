"""A day under the policy, and the same day with fixed sizes, in hindsight."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from baton.autoscaler.config import AutoscalingConfig, PoolLimits
from baton.autoscaler.decision import Observation, PoolDecision, WorkerSample
from baton.autoscaler.policy import decide
from baton.autoscaler.state import PolicyState
from bench.autoscaling.cluster import Outcome, SimulatedCluster
from bench.autoscaling.day import HOUR, Requests
from bench.autoscaling.service_times import ServiceTimes
from cluster.config.worker import ROLES

# The slowest prompts of the trace (1 in 500) take longer than this even on an idle worker.
TTFT_SECONDS, ITL_SECONDS, ATTAINMENT = 10.0, 0.060, 0.99
# Assumed: start of a pod, a model from a volume, a warm-up. Without those a worker starts in seconds
STARTUP_SECONDS = 90.0
PUBLISH_DELAY_SECONDS = 10.0  # age of what the policy sees: the slower of its two sources
POOL = PoolLimits(min_replicas=1, max_replicas=32, startup_seconds=STARTUP_SECONDS)
CONFIG = AutoscalingConfig(
    prefill=POOL,
    decode=POOL,
    gpu_budget=32,
    ttft_objective_seconds=TTFT_SECONDS,
    itl_objective_seconds=ITL_SECONDS,
    attainment=ATTAINMENT,
)
Workers = tuple[WorkerSample, ...]
RAMP = 0.2  # an hour whose rate changes by more than this is a ramp


@dataclass
class Run:
    """One day under the policy. Lists have an entry per decision."""

    outcome: Outcome
    seconds: list[float] = field(default_factory=list)
    ready: list[tuple[int, int]] = field(default_factory=list)  # prefill, decode
    gpus_held: list[int] = field(default_factory=list)
    gpus_asked: list[int] = field(default_factory=list)
    changes: list[tuple[float, PoolDecision]] = field(default_factory=list)

    def changes_by_hour(self, hours: int) -> list[int]:
        counts = [0] * hours
        for at, _ in self.changes:
            counts[min(hours - 1, int(at // HOUR))] += 1
        return counts

    def calm_changes(self, requests: Requests, hours: int) -> list[int]:
        """Changes in each hour without a ramp."""
        rates = requests.by_hour(hours)
        calm = [
            h for h in range(hours) if h == 0 or abs(rates[h] - rates[h - 1]) <= RAMP * max(1, rates[h - 1])
        ]
        counts = self.changes_by_hour(hours)
        return [counts[h] for h in calm]


def run_policy(
    requests: Requests,
    hours: int,
    start: tuple[int, int],
    config: AutoscalingConfig = CONFIG,
    times: ServiceTimes | None = None,
) -> Run:
    """Seconds of wall time for a day. `start`: replicas that are there at its beginning."""
    cluster = SimulatedCluster(requests, times or ServiceTimes(), config.prefill.startup_seconds)
    for role, replicas in zip(ROLES, start, strict=True):
        cluster.start(role, replicas)
    state = PolicyState()
    run = Run(cluster.outcome())
    told: deque[tuple[float, Workers, Workers]] = deque()
    for now in _ticks(hours, config.interval_seconds):
        cluster.run(now)
        told.append((now, cluster.workers("prefill"), cluster.workers("decode")))
        while len(told) > 1 and told[1][0] <= now - PUBLISH_DELAY_SECONDS:
            told.popleft()
        if told[0][0] <= now - PUBLISH_DELAY_SECONDS:
            # Targets and readiness come from the platform at once; the workers' status is old.
            _, prefill, decode = told[0]
            seen = Observation(cluster.observe("prefill", prefill), cluster.observe("decode", decode))
            _act(config, state, cluster, seen, now, run)
    run.outcome = cluster.finish()
    return run


def _ticks(hours: int, interval: float) -> Iterator[float]:
    return iter(np.arange(interval, hours * HOUR + 1e-6, interval).tolist())


def _act(
    config: AutoscalingConfig,
    state: PolicyState,
    cluster: SimulatedCluster,
    seen: Observation,
    now: float,
    run: Run,
) -> None:
    decision = decide(config, state, seen, now)
    for one in decision.pools:
        if one.changed:
            cluster.scale(one.role, one.target)
            run.changes.append((now, one))
    run.seconds.append(now)
    run.ready.append((cluster.replicas("prefill"), cluster.replicas("decode")))
    run.gpus_held.append(cluster.gpus_held())
    run.gpus_asked.append(decision.gpus_asked)


def run_static(
    requests: Requests, hours: int, prefill: int, decode: int, times: ServiceTimes | None = None
) -> Outcome:
    """The day with a fixed size; ended as soon as the objectives are missed (later requests count as late)."""
    cluster = SimulatedCluster(requests, times or ServiceTimes(), STARTUP_SECONDS)
    cluster.start("prefill", prefill)
    cluster.start("decode", decode)
    allowed = (1 - ATTAINMENT) * len(requests)
    for hour in range(1, hours + 1):
        cluster.run(hour * HOUR)
        if cluster.waiting > allowed or cluster.late(TTFT_SECONDS, ITL_SECONDS) > allowed:
            return cluster.outcome()
    return cluster.finish()


@dataclass(frozen=True)
class Static:
    prefill: int
    decode: int
    outcome: Outcome


def smallest_static(requests: Requests, hours: int, most: int = 32) -> Static:
    """The fixed size with the fewest GPUs (one per replica) that meets the objectives, found by walking along the
    border between sizes that do and sizes that don't: a smaller pool never improves the result."""

    def good(prefill: int, decode: int) -> Outcome | None:
        outcome = run_static(requests, hours, prefill, decode)
        return outcome if outcome.attainment(TTFT_SECONDS, ITL_SECONDS) >= ATTAINMENT else None

    fewest_prefill = bisect_left(range(1, most), True, key=lambda n: good(n, most) is not None) + 1
    fewest_decode = bisect_left(range(1, most), True, key=lambda n: good(most, n) is not None) + 1
    for total in range(fewest_prefill + fewest_decode, 2 * most + 1):
        for decode in range(fewest_decode, total - fewest_prefill + 1):
            outcome = good(total - decode, decode)
            if outcome is not None:
                return Static(total - decode, decode, outcome)
    raise RuntimeError(f"not even {most} replicas of each pool meet the objectives")
