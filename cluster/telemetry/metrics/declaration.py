"""Declarations of metrics, read by the code that counts, the exposition, docs/metrics.md and the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from cluster.telemetry.histogram import Histogram, HistogramFamily
from cluster.telemetry.scrape import Read, ScrapedMetric

Process = Literal["router", "prefill", "decode", "autoscaler"]
Together = Literal["max", "min", "sum"]


class Declaration:
    kind: ClassVar[str]

    def __init__(self, shown_by: tuple[Process, ...], name: str, unit: str, help_text: str, *labels: str):
        """`name`: as scraped, so a counter's ends in _total. `help_text`: for docs and exposition."""
        self.shown_by, self.name, self.unit, self.help, self.labels = shown_by, name, unit, help_text, labels
        self.family = name.removesuffix("_total")


class Scrapable(Declaration):
    """A metric whose owner keeps one number, or numbers by labels."""

    made_of: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def empty(self) -> CounterMetricFamily | GaugeMetricFamily:
        return self.made_of(self.family, self.help, labels=self.labels)

    def read(self, read: Callable[[], Read]) -> ScrapedMetric:
        return ScrapedMetric(self.empty, read)


class Counter(Scrapable):
    kind = "counter"
    made_of = CounterMetricFamily

    def create(
        self, registry: CollectorRegistry, series: Iterable[str | tuple[str, ...]] = ()
    ) -> prometheus_client.Counter:
        """Create the counter with `series` at 0: rate() misses the first increase of a series that appears with it."""
        made = prometheus_client.Counter(self.name, self.help, self.labels, registry=registry)
        for values in series:
            made.labels(*([values] if isinstance(values, str) else values))
        return made


class Gauge(Scrapable):
    kind = "gauge"
    made_of = GaugeMetricFamily

    def __init__(
        self,
        shown_by: tuple[Process, ...],
        name: str,
        unit: str,
        help_text: str,
        *labels: str,
        together: Together = "max",
    ):
        """`together`: how a router combines the values of its processes (router/processes/snapshots.py)."""
        super().__init__(shown_by, name, unit, help_text, *labels)
        self.together = together

    def create(self, registry: CollectorRegistry) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(self.name, self.help, self.labels, registry=registry)


class Distribution(Declaration):
    kind = "histogram"

    def __init__(
        self,
        shown_by: tuple[Process, ...],
        name: str,
        unit: str,
        help_text: str,
        bounds: tuple[float, ...],
        *labels: str,
    ):
        super().__init__(shown_by, name, unit, help_text, *labels)
        self.bounds = bounds

    def create(self, registry: CollectorRegistry | None = None) -> Histogram:
        """Create a histogram; without a registry its owner adds it to one later."""
        made = Histogram(self.bounds)
        if registry is not None:
            registry.register(self.show(made))
        return made

    def create_family(self) -> HistogramFamily:
        return HistogramFamily(self.name, self.help, self.bounds, self.labels)

    def show(self, histogram: Histogram) -> HistogramFamily:
        """Add a histogram without labels to a registry."""
        family = self.create_family()
        family.adopt(histogram)
        return family
