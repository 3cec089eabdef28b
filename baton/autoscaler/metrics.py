"""Metrics of decisions."""

from __future__ import annotations

from itertools import product

from prometheus_client import CollectorRegistry

from baton.autoscaler.config import ROLES
from baton.autoscaler.decision import Decision, Reason
from cluster.telemetry.metrics import autoscaler as declared

PARTS = ("redis", "platform")


class AutoscalingMetrics:
    """Every counter exists from the start, so that rate() sees its first increase."""

    def __init__(self, registry: CollectorRegistry):
        self._desired = declared.DESIRED_REPLICAS.create(registry)
        self._current = declared.CURRENT_REPLICAS.create(registry)
        self._needed = declared.NEEDED_REPLICAS.create(registry)
        self._asked = declared.GPUS_ASKED.create(registry)
        self._budget = declared.GPU_BUDGET.create(registry)
        self.leader = declared.LEADER.create(registry)
        self.decisions = declared.DECISIONS.create(registry, product(ROLES, Reason))
        self.changes = declared.CHANGES.create(registry, product(ROLES, ("up", "down")))
        self.errors = declared.ERRORS.create(registry, PARTS)

    def count(self, decision: Decision) -> None:
        for one in decision.pools:
            self._desired.labels(one.role).set(one.target)
            self._current.labels(one.role).set(one.ready)
            self._needed.labels(one.role).set(one.needed)
            self.decisions.labels(one.role, one.reason).inc()
            if one.changed:
                self.changes.labels(one.role, "up" if one.target > one.before else "down").inc()
        self._asked.set(decision.gpus_asked)
        self._budget.set(decision.gpu_budget)
