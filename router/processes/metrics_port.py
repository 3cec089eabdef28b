"""The port for probes and Prometheus of a router of several processes.

`/metrics`: all processes together. `/metrics/0`, `/metrics/1`, …: one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.config.router import RouterConfig
from cluster.protocol.times import LOOP_STALL_SECONDS
from cluster.telemetry.exposition import MetricsServer
from router.processes.child_process import ChildProcess
from router.processes.merged_metrics import MergedMetrics, Shown

COLLECT_SECONDS = 5.0
POLL_SECONDS = 1.0


class MetricsPort:
    """Made on the event loop; serves on threads of its own, until `close`."""

    def __init__(
        self,
        config: RouterConfig,
        metrics: MergedMetrics,
        why_not_ready: Callable[[], Sequence[str]],
        children: Mapping[int, ChildProcess],
    ):
        assert config.metrics_port is not None, "asked for"
        self._loop = asyncio.get_running_loop()
        self._turned = time.monotonic()
        self._timer: asyncio.Handle = self._loop.call_soon(self._turn)
        router = _Collected(self._loop, lambda: _merged(metrics))

        def of(index: int) -> Coroutine[Any, Any, Sequence[Metric]]:
            return metrics.of_process(children.get(index))

        processes = {
            f"metrics/{index}": _Collected(self._loop, partial(of, index))
            for index in range(config.processes)
        }

        probes = {"ready": why_not_ready, "live": self._why_not_live}
        self._server = MetricsServer(
            config.host,
            config.metrics_port,
            router,
            probes,
            {"router": config.router_id},
            pages=processes,
        )
        self.port = self._server.port

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._timer = self._loop.call_later(POLL_SECONDS, self._turn)

    def _why_not_live(self) -> list[str]:
        """Why the parent is not live; it replaces other processes that stand still."""
        silent = time.monotonic() - self._turned
        return [f"the event loop has stood still for {silent:.0f} s"] if silent > LOOP_STALL_SECONDS else []

    def close(self) -> None:
        self._server.close()
        self._loop.call_soon_threadsafe(lambda: self._timer.cancel())  # noqa: PLW0108 - `_turn` replaces the timer


async def _merged(metrics: MergedMetrics) -> Sequence[Metric]:
    return list(Shown(await metrics.collect()).collect())


class _Collected(Collector):
    """Collected on the event loop for a thread that waits."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: Callable[[], Coroutine[Any, Any, Sequence[Metric]]]
    ):
        self._loop = loop
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(COLLECT_SECONDS)
