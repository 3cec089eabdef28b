"""Logs each decision once until it changes, and warns of settings that do not fit what is observed."""

from __future__ import annotations

import logging

from baton.autoscaler.config import ROLES, AutoscalingConfig
from baton.autoscaler.decision import Decision, Reason
from baton.autoscaler.state import PolicyState
from cluster.config.worker import Role


class Explained:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[Role, Reason] = {}
        self._warned: dict[Role, float] = {}  # start-up seconds that were warned of

    def say(self, decision: Decision) -> None:
        for one in decision.pools:
            if one.changed or self._said.get(one.role) != one.reason:
                self._log.info("%s", one.explain())
            else:
                self._log.debug("%s", one.explain())
            self._said[one.role] = one.reason

    def warn(self, config: AutoscalingConfig, state: PolicyState) -> None:
        """Warn of replicas that start later than configured: once, and again if they take even longer."""
        for role in ROLES:
            took, expected = state.pool(role).start_seconds, config.pool(role).startup_seconds
            if took > max(expected, 1.2 * self._warned.get(role, 0.0)):
                self._warned[role] = took
                self._log.warning(
                    "autoscaling pool=%s: a replica took %.0f s to start; startup_seconds says %.0f, and should be more",
                    *(role, took, expected),
                )
