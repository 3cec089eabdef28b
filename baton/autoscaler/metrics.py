"""Decisions as metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.autoscaler.config import ROLES
from baton.autoscaler.decision import Decision, Reason

PARTS = ("redis", "platform")


class AutoscalingMetrics:
    """Every counter is there from the beginning, so that its first event is an increase."""

    def __init__(self, registry: CollectorRegistry):
        def gauge(name: str, text: str, labels: tuple[str, ...] = ("pool",)) -> Gauge:
            return Gauge(f"baton_autoscaling_{name}", text, labels, registry=registry)

        self._desired = gauge("desired_replicas", "Replicas asked of the platform")
        self._current = gauge("current_replicas", "Replicas that serve")
        self._needed = gauge("needed_replicas", "Replicas that the load asks for, before limits and budget")
        self._asked = gauge("gpus_asked", "GPUs of both pools, draining replicas included", ())
        self._budget = gauge("gpu_budget", "GPUs that both pools may take", ())
        self.leader = gauge("leader", "1: this process is the one that acts", ())
        self.decisions = Counter(
            "baton_autoscaling_decisions_total",
            "Decisions by what they rest on",
            ["pool", "reason"],
            registry=registry,
        )
        self.changes = Counter(
            "baton_autoscaling_changes_total",
            "Decisions that changed a pool",
            ["pool", "direction"],
            registry=registry,
        )
        self.errors = Counter(
            "baton_autoscaling_errors_total",
            "Rounds without a decision, or whose decision was not carried out",
            ["part"],
            registry=registry,
        )
        for role in ROLES:
            for reason in Reason:
                self.decisions.labels(role, reason)
            for direction in ("up", "down"):
                self.changes.labels(role, direction)
        for part in PARTS:
            self.errors.labels(part)

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
