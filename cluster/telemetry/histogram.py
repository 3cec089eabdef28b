"""Histograms whose observations cost one bisect and two additions; those of prometheus_client take two locks.

One thread observes, any thread scrapes. An observation may carry a trace id; each bucket keeps the last one as its
exemplar.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
CALL_SECONDS = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
TOKEN_COUNTS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TENANT_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Histogram:
    """`counts[i]`: observations in (bounds[i-1], bounds[i]]; the last bucket is open."""

    __slots__ = ("_exemplars", "bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, trace_id: str = "") -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        if trace_id:
            self.note(value, trace_id)

    def observe_all(self, values: Sequence[float]) -> None:
        """Equal values cost one bisect together."""
        bounds, counts = self.bounds, self.counts
        for value, count in Counter(values).items():
            counts[bisect_left(bounds, value)] += count
        self.sum = sum(values, self.sum)

    @staticmethod
    def observe_each(pairs: Iterable[tuple[Histogram, float]], trace_id: str = "") -> None:
        """`observe` a value by each histogram, in one call: calls cost more than observations."""
        for histogram, value in pairs:
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.sum += value
            if trace_id:
                histogram.note(value, trace_id)

    def note(self, value: float, trace_id: str) -> None:
        """Make it its bucket's exemplar; it is counted by `observe_all` or `observe_each`."""
        self._exemplars[bisect_left(self.bounds, value)] = Exemplar(
            {"trace_id": trace_id}, value, time.time()
        )

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
        """Return (upper bound, cumulative count[, exemplar]) per bucket, in the form of prometheus_client."""
        shown: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        total = 0
        names = [*(repr(float(bound)) for bound in self.bounds), "+Inf"]
        for index, (name, count) in enumerate(zip(names, list(self.counts), strict=True)):
            total += count
            exemplar = self._exemplars.get(index)
            shown.append((name, total, exemplar) if exemplar is not None else (name, total))
        return shown


class HistogramFamily(Collector):
    """Histograms of one name. Label values come from code, never from clients."""

    def __init__(self, name: str, help_text: str, bounds: Iterable[float], labels: Iterable[str] = ()):
        self._name = name
        self._help = help_text
        self._bounds = tuple(bounds)
        self._labels = tuple(labels)
        self._members: dict[tuple[str, ...], Histogram] = {}

    def of(self, *values: str) -> Histogram:
        """Return the histogram of these label values, created at the first call."""
        known = self._members.get(values)
        if known is None:
            known = self._members[values] = Histogram(self._bounds)
        return known

    def adopt(self, histogram: Histogram, *values: str) -> None:
        """Add a histogram that its owner created and observes."""
        self._members[values] = histogram

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, member in list(self._members.items()):
            family.add_metric(values, member.buckets(), member.sum)
        yield family
