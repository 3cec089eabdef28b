"""The policy's loop outside Ray Serve: reads the status of workers from Redis and scales through the platform."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from prometheus_client import CollectorRegistry

from baton.autoscaler.config import AutoscalingConfig
from baton.autoscaler.decision import Decision, Observation, PoolDecision, PoolObservation, WorkerSample
from baton.autoscaler.leader import Leadership
from baton.autoscaler.platforms.base import Platform, PlatformPool
from baton.autoscaler.policy import Model, decide_all
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


Pools = dict[tuple[str, Role], PlatformPool]  # by model


@dataclass(frozen=True)
class FurtherModel:
    """A model beside the first one, with its own limits, objectives and pools."""

    name: str
    config: AutoscalingConfig
    platform: Platform


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
        model: str = "",
        further: Sequence[FurtherModel] = (),
    ):
        """`model`: the first one's name; "" where it is the only one. `further`: models beside it; all share its
        gpu_budget."""
        self._config = config
        self._redis_url = redis_url
        self._namespace = namespace
        self._clock = clock
        self._models = [
            Model(model, config, PolicyState()),
            *(Model(one.name, one.config, PolicyState()) for one in further),
        ]
        self._platforms = {model: platform, **{one.name: one.platform for one in further}}
        self._explained = Explained(log)
        self.metrics = AutoscalingMetrics(registry, list(self._platforms))
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
        """Decide and act once. Returns the first model's decision; None if nothing could be read."""
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
            pools: Pools = {
                (model, role): platform.read(role)
                for model, platform in self._platforms.items()
                for role in ROLES
            }
        except BatonError as error:
            log.warning("autoscaling is paused: %s", error.message)
            self.metrics.errors.labels("platform").inc()
            return None
        seen = [self._observe(model.name, workers, pools) for model in self._models]
        decisions = decide_all(self._models, seen, self._clock())
        if leads:
            self.metrics.count(*decisions)
            for model, decision in zip(self._models, decisions, strict=True):
                self._explained.say(decision)
                self._explained.warn(model.config, model.state, model.name)
            self._act(decisions, pools)
        return decisions[0]

    def _observe(self, model: str, workers: Sequence[WorkerInfo], pools: Pools) -> Observation:
        """Observe one model's pools. Of several models, a worker that names no model is the first one's, and one that
        names none of these is of no pool, as a router places on it. Where the first one's name is not known, all others
        are its workers."""
        first, *further = self._platforms

        def model_of(one: WorkerInfo) -> str:
            own = one.served_model
            return own if own in further or (own and first and further) else first

        of_model = [one for one in workers if model_of(one) == model]
        return Observation(*(_observe(role, of_model, pools[model, role]) for role in ROLES))

    def _act(self, decisions: Sequence[Decision], pools: Pools) -> None:
        """Scale down first, so that targets never exceed the budget. One pool's failure does not stop the others."""
        for one in sorted((pool for decision in decisions for pool in decision.pools), key=_growth):
            if not one.changed:
                continue
            if not self.leadership.sure(ACT_SECONDS):
                log.warning("not acting on pool=%s: the lease is too close to its end", one.role)
                return
            try:
                self._platforms[one.model].scale(one.role, one.target, pools[one.model, one.role])
            except BatonError as error:
                log.warning("pool=%s was not changed: %s", one.role, error.message)
                self.metrics.errors.labels("platform").inc()
                if _growth(one) < 0:
                    return  # another pool's growth may need these GPUs


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
