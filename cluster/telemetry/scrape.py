"""Metrics that are read where their owners keep them, when somebody scrapes: they cost nothing in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

READ_TRIES = 3
# One number; or numbers by the value of a label; or by the values of several.
Read = float | Mapping[str, float] | Mapping[tuple[str, ...], float]


@dataclass(frozen=True)
class ScrapedMetric:
    """`read` runs on the scraping thread: it looks and changes nothing. A counter's name ends without _total."""

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    read: Callable[[], Read]
    labels: Sequence[str] = ()

    def samples(self) -> Iterable[tuple[tuple[str, ...], float]]:
        value = _steadily(self.read)
        if not isinstance(value, Mapping):
            return [((), float(value))]
        return [((key,) if isinstance(key, str) else key, float(number)) for key, number in value.items()]


def gauge(name: str, help_text: str, read: Callable[[], Read], *labels: str) -> ScrapedMetric:
    return ScrapedMetric("gauge", name, help_text, read, labels)


def counter(name: str, help_text: str, read: Callable[[], Read], *labels: str) -> ScrapedMetric:
    return ScrapedMetric("counter", name, help_text, read, labels)


class ScrapeCollector(Collector):
    def __init__(self, readings: Iterable[ScrapedMetric]):
        self._readings = list(readings)

    def collect(self) -> Iterator[Metric]:
        for reading in self._readings:
            family = GaugeMetricFamily if reading.kind == "gauge" else CounterMetricFamily
            metric = family(reading.name, reading.help, labels=reading.labels)
            for values, number in reading.samples():
                metric.add_metric(values, number)
            yield metric


def _steadily(read: Callable[[], Read]) -> Read:
    """Owners live on other threads: a table that grew while it was walked is walked again."""
    for _ in range(READ_TRIES - 1):
        try:
            return read()
        except RuntimeError:
            continue
    return read()
