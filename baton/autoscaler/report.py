"""Log lines and metrics of the policy's decisions."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from itertools import product

from prometheus_client import CollectorRegistry

from baton.autoscaler.config import AutoscalingConfig, ServeAutoscalingConfig
from baton.autoscaler.decision import Decision, Reason
from baton.autoscaler.state import PolicyState
from cluster.config.worker import ROLES, Role
from cluster.errors import ConfigError
from cluster.telemetry.exposition import MetricsServer
from cluster.telemetry.metrics import autoscaler as declared

PARTS = ("redis", "platform")


class AutoscalingMetrics:
    """Every counter exists from the start, so that rate() sees its first increase."""

    def __init__(self, registry: CollectorRegistry, models: Sequence[str] = ("",)):
        """`models`: their names; "": the only one."""
        self._desired = declared.DESIRED_REPLICAS.create(registry)
        self._current = declared.CURRENT_REPLICAS.create(registry)
        self._needed = declared.NEEDED_REPLICAS.create(registry)
        self._asked = declared.GPUS_ASKED.create(registry)
        self._budget = declared.GPU_BUDGET.create(registry)
        self.leader = declared.LEADER.create(registry)
        self.decisions = declared.DECISIONS.create(registry, product(models, ROLES, Reason))
        self.changes = declared.CHANGES.create(registry, product(models, ROLES, ("up", "down")))
        self.errors = declared.ERRORS.create(registry, PARTS)

    def count(self, *decisions: Decision) -> None:
        """One round: the decision of each model."""
        for one in (pool for decision in decisions for pool in decision.pools):
            labels = one.model, one.role
            self._desired.labels(*labels).set(one.target)
            self._current.labels(*labels).set(one.ready)
            self._needed.labels(*labels).set(one.needed)
            self.decisions.labels(*labels, one.reason).inc()
            if one.changed:
                self.changes.labels(*labels, "up" if one.target > one.before else "down").inc()
        self._asked.set(sum(decision.gpus_asked for decision in decisions))
        self._budget.set(decisions[0].gpu_budget)


class Explained:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[tuple[str, Role], Reason] = {}
        self._warned: dict[tuple[str, Role], float] = {}  # start-up seconds that were warned of

    def say(self, decision: Decision) -> None:
        for one in decision.pools:
            if one.changed or self._said.get((one.model, one.role)) != one.reason:
                self._log.info("%s", one.explain())
            else:
                self._log.debug("%s", one.explain())
            self._said[one.model, one.role] = one.reason

    def warn(self, config: AutoscalingConfig, state: PolicyState, model: str = "") -> None:
        """Warn of replicas that start later than configured: once, and again if they take even longer."""
        for role in ROLES:
            took, expected = state.pool(role).start_seconds, config.pool(role).startup_seconds
            if took > max(expected, 1.2 * self._warned.get((model, role), 0.0)):
                self._warned[model, role] = took
                self._log.warning(
                    "autoscaling %spool=%s: a replica took %.0f s to start; startup_seconds is %.0f and should be larger",
                    *(f"model={model} " if model else "", role, took, expected),
                )


class ServeMetrics:
    """Serve creates a new policy for each deployment and drops the old one: a port that is still taken is tried again at
    the next decision. Decisions never wait for it."""

    def __init__(self, config: ServeAutoscalingConfig, log: logging.Logger):
        self._config = config
        self._log = log
        self._registry = CollectorRegistry()
        self._metrics = AutoscalingMetrics(self._registry)
        self._metrics.leader.set(1)
        self._refused = False
        self._close: Callable[[], None] | None = None

    def count(self, decision: Decision) -> None:
        self._metrics.count(decision)
        if self._close is None:
            self._open()

    def _open(self) -> None:
        host, port = self._config.metrics_host, self._config.metrics_port
        try:
            server = MetricsServer(host, port, self._registry, {}, {})
        except ConfigError as error:
            if not self._refused:
                self._log.warning(
                    "cannot serve the autoscaler's metrics at %s:%d, retrying: %s", host, port, error
                )
            self._refused = True
            return
        self._log.info("autoscaling shows /metrics at %s:%d", host, server.port)
        self._close = server.close

    def __del__(self) -> None:
        if self._close is not None:
            with contextlib.suppress(OSError):
                self._close()
