"""Metrics read from their owners at each scrape; they cost nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READ_TRIES = 3
# One number, or numbers by the value of one label or of several.
Read = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class ScrapedMetric:
    """`read` runs on the scraping thread and changes nothing. `family` creates a family without samples."""

    family: Callable[[], CounterMetricFamily | GaugeMetricFamily]
    read: Callable[[], Read]

    def samples(self) -> Iterable[tuple[tuple[str, ...], float]]:
        value = _steadily(self.read)
        if not isinstance(value, Mapping):
            return [((), float(value))]
        return [((key,) if isinstance(key, str) else key, float(number)) for key, number in value.items()]


class ScrapeCollector(Collector):
    def __init__(self, metrics: Iterable[ScrapedMetric]):
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        for one in self._metrics:
            family = one.family()
            for values, number in one.samples():
                family.add_metric(values, number)
            yield family


def _steadily(read: Callable[[], Read]) -> Read:
    """Read again if a table grew during iteration: its owner runs on another thread."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except RuntimeError:
            continue
    return read()
