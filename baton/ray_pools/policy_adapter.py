"""Adapter of the policy to Ray Serve, which runs it in its controller for both pools at once.

Serve calls about ten times a second; a decision is made every `interval_seconds`. The status of workers is what
replicas record (`record_autoscaling_stats`), a few seconds old. Serve chooses which replica leaves; each drains in its
destructor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.autoscaler.decision import Observation, PoolObservation, WorkerSample
from baton.autoscaler.policy import decide
from baton.autoscaler.report import Explained, ServeMetrics
from baton.autoscaler.state import PolicyState
from cluster.config.worker import ROLES, Role
from cluster.membership.status import WorkerStatus

Decisions = dict[Any, int]  # by Serve's deployment ids
States = dict[Any, dict[str, Any]]


def deployment_name(role: Role) -> str:
    return f"{role.capitalize()}Pool"


class PoolsPolicy:
    """Created by Serve's controller with `config` as JSON. After the controller's restart, targets are read from Serve."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = ServeAutoscalingConfig.model_validate(config)
        self._state = PolicyState()
        # Where Serve's own decisions are logged: in the controller's file.
        log = logging.getLogger("ray.serve")
        self._explained = Explained(log)
        self._metrics = ServeMetrics(self._config, log)
        self._next = time.monotonic()

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[Decisions, States]:
        by_name = {context.deployment_name: (key, context) for key, context in contexts.items()}
        kept: States = {key: {} for key in contexts}
        if time.monotonic() < self._next or any(deployment_name(role) not in by_name for role in ROLES):
            return {key: context.target_num_replicas for key, context in contexts.items()}, kept
        self._next = time.monotonic() + self._config.interval_seconds
        prefill, decode = (_observe(by_name[deployment_name(role)][1]) for role in ROLES)
        decision = decide(self._config, self._state, Observation(prefill, decode), time.monotonic())
        self._explained.say(decision)
        self._explained.warn(self._config, self._state)
        self._metrics.count(decision)
        return {by_name[deployment_name(one.role)][0]: one.target for one in decision.pools}, kept


def _observe(context: Any) -> PoolObservation:
    statuses: dict[str, dict[str, float]] = {}
    for field, by_replica in (context.raw_metrics or {}).items():
        for replica, series in by_replica.items():
            if len(series):
                statuses.setdefault(str(replica), {})[field] = float(series[-1].value)
    return PoolObservation(
        target=context.target_num_replicas,
        ready=len(context.running_replicas),
        workers=tuple(WorkerSample(name, WorkerStatus.decode(status)) for name, status in statuses.items()),
    )
