"""The policy's loop outside Ray Serve: reads the status of workers from Redis and scales through the platform."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import redis
from prometheus_client import CollectorRegistry

from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.decision import Decision, Observation, PoolDecision, PoolObservation, WorkerSample
from baton.autoscaler.leader import Leadership
from baton.autoscaler.platforms.base import Platform, PlatformPool
from baton.autoscaler.policy import decide
from baton.autoscaler.report import AutoscalingMetrics, Explained
from baton.autoscaler.rights import rights
from baton.autoscaler.state import PolicyState
from cluster.config.worker import ROLES, Role
from cluster.errors import BatonError
from cluster.membership.reader import look_at_workers
from cluster.membership.types import WorkerInfo
from cluster.redis.rights import RightsWatch

log = logging.getLogger(__name__)
ACT_SECONDS = 12.0  # longest time to carry out a decision; the lease must last that long
LEASE_SECONDS = 30.0


class Autoscaler:
    """`step` decides once, `run` repeatedly. An error ends one round: it is logged and counted, and the next round reads
    everything again. While another autoscaler leads, the policy keeps observing and changes nothing."""

    def __init__(
        self,
        config: AutoscalingConfig,
        redis_url: str,
        namespace: str,
        platform: Platform,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config
        self._redis_url = redis_url
        self._namespace = namespace
        self._platform = platform
        self._clock = clock
        self._state = PolicyState()
        self._explained = Explained(log)
        self.metrics = AutoscalingMetrics(registry)
        self.leadership = Leadership(redis_url, namespace, LEASE_SECONDS, clock)
        self._watch = RightsWatch(redis_url, rights(namespace))

    def run(self, stop: threading.Event) -> None:
        self._watch.start()
        try:
            while not stop.is_set():
                self.step()
                stop.wait(self._config.interval_seconds)
        finally:
            self._watch.stop()
            self.leadership.close()

    def step(self) -> Decision | None:
        """Decide and act once. Returns None if nothing could be read."""
        try:
            leads = self.leadership.hold()
            self.metrics.leader.set(leads)
            workers = look_at_workers(self._redis_url, self._namespace)
        except (redis.RedisError, OSError) as error:
            log.warning("autoscaling is paused, Redis does not answer: %s", error)
            self.metrics.leader.set(self.leadership.sure())
            self.metrics.errors.labels("redis").inc()
            return None
        try:
            pools: dict[Role, PlatformPool] = {role: self._platform.read(role) for role in ROLES}
        except BatonError as error:
            log.warning("autoscaling is paused: %s", error.message)
            self.metrics.errors.labels("platform").inc()
            return None
        seen = Observation(
            _observe("prefill", workers, pools["prefill"]), _observe("decode", workers, pools["decode"])
        )
        decision = decide(self._config, self._state, seen, self._clock())
        if leads:
            self.metrics.count(decision)
            self._explained.say(decision)
            self._explained.warn(self._config, self._state)
            self._act(decision, pools)
        return decision

    def _act(self, decision: Decision, pools: dict[Role, PlatformPool]) -> None:
        """Scale down first, so that targets never exceed the budget. One pool's failure does not stop the other."""
        for one in sorted(decision.pools, key=_growth):
            if not one.changed:
                continue
            if not self.leadership.sure(ACT_SECONDS):
                log.warning("not acting on pool=%s: the lease is too close to its end", one.role)
                return
            try:
                self._platform.scale(one.role, one.target, pools[one.role])
            except BatonError as error:
                log.warning("pool=%s was not changed: %s", one.role, error.message)
                self.metrics.errors.labels("platform").inc()
                if _growth(one) < 0:
                    return  # the other pool's growth may need these GPUs


def _growth(one: PoolDecision) -> int:
    return one.target - one.before


def _observe(role: Role, workers: Sequence[WorkerInfo], pool: PlatformPool) -> PoolObservation:
    """A suspect worker counts: it may only have missed a renewal. A draining one publishes but takes no requests."""
    there = [one for one in workers if one.role == role and one.lease != "dead"]
    draining = sum(one.state == "draining" for one in there)
    return PoolObservation(
        target=pool.target,
        ready=len(there) - draining,
        draining=max(draining, pool.terminating),
        starting=pool.starting,
        unschedulable=pool.unschedulable,
        workers=tuple(WorkerSample(one.name, one.status) for one in there),
    )
