"""Each decision in one line of the log, once for as long as nothing about it changes."""

from __future__ import annotations

import logging

from baton.autoscaling.decision import Decision, Reason
from cluster.config import Role


class Explained:
    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[Role, Reason] = {}

    def say(self, decision: Decision) -> None:
        for one in decision.pools:
            if one.changed or self._said.get(one.role) != one.reason:
                self._log.info("%s", one.explain())
            else:
                self._log.debug("%s", one.explain())
            self._said[one.role] = one.reason
