"""A worker's metrics port with its probes, traces and event loop lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client.registry import Collector

from cluster.addresses import join
from cluster.config.worker import WorkerConfig
from cluster.telemetry.exposition import MetricsServer
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.registry import Registry
from cluster.telemetry.tracing.setup import open_tracing
from worker.health import Health


class WorkerTelemetry:
    """Probes are answered from construction on, also while the model is loaded."""

    def __init__(self, config: WorkerConfig, health: Health, advertised_host: str):
        labels = {"worker": config.worker_id, "role": config.role}
        probes = {"ready": health.why_not_ready, "live": health.why_not_live}
        self._health = health
        self._registry = Registry(labels, aliases=config.metrics_aliases, model=config.engine.model.name)
        self._exporter = MetricsServer(config.host, config.metrics_port, self._registry, probes, labels)
        self.metrics_address = join(advertised_host, self._exporter.port)
        self.tracing = open_tracing(config, f"baton-{config.role}", config.worker_id)
        self.loop_lag = LoopLag()
        self._ticking: asyncio.Task[None] | None = None

    def start(self, collectors: Iterable[Collector]) -> None:
        self._ticking = asyncio.get_running_loop().create_task(self._health.tick())
        self.loop_lag.start()
        self._registry.add(collectors)

    def close(self) -> None:
        """Close the metrics port and send the last spans. Blocks; may be called on any thread."""
        self._exporter.close()
        if self.tracing is not None:
            self.tracing.close()

    async def stop(self) -> None:
        self.loop_lag.stop()
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.to_thread(self.close)
