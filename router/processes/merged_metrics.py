"""The metrics of a router of several processes, as if it were one.

Only the parent merges, so every answer comes from the same memory: what was once shown of a process is known when it dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.telemetry.exposition import encode
from router.processes import snapshots
from router.processes.snapshots import Snapshot

SCRAPE_SECONDS = 1.0  # for a process to answer; later its gauges are missing, its counters as they were last


class Source(Protocol):
    """A process that serves, from its start to its end."""

    async def scrape(self, seconds: float) -> Snapshot | None:
        """None: no answer in time."""


class Shown(Collector):
    """Metrics that have been collected, for the exposition."""

    def __init__(self, snapshot: Snapshot):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return snapshots.metrics(self._snapshot)


class MergedMetrics:
    """`add` and `ended` for each process; then `collect` at any time, on the event loop."""

    def __init__(self, own: CollectorRegistry):
        """`own`: the parent's."""
        self._own = own
        self._last: dict[Source, Snapshot] = {}
        self._ended: Snapshot = {}
        self._shown: Snapshot = {}
        self._collecting = asyncio.Lock()

    def add(self, source: Source) -> None:
        self._last[source] = {}

    def ended(self, source: Source) -> None:
        """Keep what the process had counted when it answered last."""
        last = self._last.pop(source, None)
        if last is not None:
            self._ended = snapshots.total([self._ended, snapshots.only_grown(last)])

    async def collect(self) -> Snapshot:
        """Waits SCRAPE_SECONDS at most for processes, all of them at once."""
        async with self._collecting:
            self._shown = snapshots.without_rounding(await self._collect(), self._shown)
            return self._shown

    async def _collect(self) -> Snapshot:
        asked = list(self._last)
        answers = await asyncio.gather(*(source.scrape(SCRAPE_SECONDS) for source in asked))
        parts: list[Snapshot] = []
        for source, answer in zip(asked, answers, strict=True):
            if source in self._last:  # else it has ended meanwhile, and counts as it was
                if answer is not None:
                    self._last[source] = answer
                parts.append(answer if answer is not None else snapshots.only_grown(self._last[source]))
        own = snapshots.decode(snapshots.encode(self._own.collect()))
        return snapshots.total([own, *parts, self._ended])

    async def encoded(self, accept: str) -> tuple[bytes, str]:
        return encode(Shown(await self.collect()), accept)

    async def of_process(self, source: Source | None) -> Sequence[Metric]:
        """A process's own metrics; none, if it does not answer."""
        answer = await source.scrape(SCRAPE_SECONDS) if source is not None else None
        return list(snapshots.metrics(answer or {}))
