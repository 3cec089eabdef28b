"""A worker's metrics port with its probes, traces and event loop lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from cluster.addresses import join
from cluster.config.worker import WorkerConfig
from cluster.telemetry.exposition import MetricsServer
from cluster.telemetry.loop_lag import LoopLag
from cluster.telemetry.registry import Registry
from cluster.telemetry.tracing.setup import open_tracing
from engine.request import PromptChunk
from worker.health import Health

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cluster.telemetry.tracing.spans import Tracing
    from wire import common_pb2


class WorkerTelemetry:
    """Probes are answered from construction on, also while the model is loaded."""

    def __init__(self, config: WorkerConfig, health: Health, advertised_host: str):
        model = config.served_model_name or config.engine.model.name  # as routers name it
        worker = {"worker": config.worker_id, "role": config.role}
        probes = {"ready": health.why_not_ready, "live": health.why_not_live}
        self._health = health
        self._registry = Registry({**worker, "model": model}, aliases=config.metrics_aliases, model=model)
        self._exporter = MetricsServer(
            config.host, config.metrics_port, self._registry, probes, worker, health.warnings
        )
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


def record_prefill(
    tracing: Tracing,
    parent: Context,
    received: float,
    report: common_pb2.WorkReport,
    chunks: Sequence[PromptChunk],
    facts: dict[str, str | int],
) -> float:
    """Record the spans of a prompt that this worker computed: queue, prefill, chunks. Returns the time of its end."""
    began = received + report.prefill_queue_seconds
    ended = began + report.prefill_seconds
    tracing.record(parent, "baton.prefill.queue", received, began, facts)
    tokens = {
        "baton.computed_tokens": report.computed_prompt_tokens,
        "baton.cached_tokens": report.cached_tokens,
    }
    prefill = tracing.record(parent, "baton.prefill", began, ended, {**facts, **tokens})
    for chunk in chunks:
        counted = {"baton.tokens": chunk.tokens}
        tracing.record(prefill, "baton.prefill.chunk", chunk.began, chunk.ended, counted)
    return ended
