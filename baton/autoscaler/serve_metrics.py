"""/metrics of the policy inside Ray Serve's controller, under the names of `baton autoscale`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server

from baton.autoscaler.config import ServeAutoscalingConfig
from baton.autoscaler.decision import Decision
from baton.autoscaler.metrics import AutoscalingMetrics


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
            server, _ = start_http_server(port, host, self._registry)
        except OSError as error:
            if not self._refused:
                self._log.warning("autoscaling has no /metrics at %s:%d yet: %s", host, port, error)
            self._refused = True
            return
        self._log.info("autoscaling shows /metrics at %s:%d", host, server.server_port)

        def close() -> None:
            server.shutdown()
            server.server_close()

        self._close = close

    def __del__(self) -> None:
        if self._close is not None:
            with contextlib.suppress(OSError):
                self._close()
