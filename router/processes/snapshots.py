"""Metrics of a process as it sends them to its parent, and the sum of those of several processes.

Counters and histograms are added; what a process that has ended had counted stays in the sum, so nothing falls. Gauges
are combined as their declarations say (`together`), of the processes that answered: those of others have gone with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

from cluster.telemetry.metrics.catalogue import DECLARED
from cluster.telemetry.metrics.declaration import Gauge

Labels = tuple[tuple[str, str], ...]
_COMBINE: Mapping[str, Callable[[float, float], float]] = {"sum": float.__add__, "max": max, "min": min}
# Of prometheus_client's ProcessCollector, which declares nothing itself
_PROCESS_GAUGES = {
    "process_resident_memory_bytes": "sum",
    "process_virtual_memory_bytes": "sum",
    "process_open_fds": "sum",
    "process_start_time_seconds": "min",
}
_CREATED = "_created"  # when a series began: the earliest counts


@dataclass
class Family:
    name: str
    documentation: str
    kind: str
    samples: dict[tuple[str, Labels], Sample] = field(default_factory=dict)

    @property
    def grows(self) -> bool:
        """Whether its samples only grow while their process lives."""
        return self.kind in ("counter", "histogram")


Snapshot = dict[str, Family]


def encode(metrics: Iterable[Metric]) -> list[Any]:
    """A snapshot of the metrics as JSON can hold it."""
    return [
        [one.name, one.documentation, one.type, [_encode_sample(sample) for sample in one.samples]]
        for one in metrics
    ]


def _encode_sample(sample: Sample) -> list[Any]:
    exemplar = sample.exemplar
    shown = [exemplar.labels, exemplar.value, exemplar.timestamp] if exemplar is not None else None
    return [sample.name, sample.labels, sample.value, shown]


def decode(raw: Iterable[Any]) -> Snapshot:
    families: Snapshot = {}
    for name, documentation, kind, samples in raw:
        family = families[name] = Family(name, documentation, kind)
        for sample_name, labels, value, exemplar in samples:
            shown = Exemplar(*exemplar) if exemplar is not None else None
            key = sample_name, tuple(sorted(labels.items()))
            family.samples[key] = Sample(sample_name, labels, float(value), None, shown)
    return families


def only_grown(snapshot: Snapshot) -> Snapshot:
    """The metrics that only grow: those that stay of a process that does not answer, or has ended."""
    return {name: family for name, family in snapshot.items() if family.grows}


def total(snapshots: Iterable[Snapshot]) -> Snapshot:
    together: Snapshot = {}
    for snapshot in snapshots:
        for name, family in snapshot.items():
            into = together.setdefault(name, Family(name, family.documentation, family.kind))
            for key, sample in family.samples.items():
                before = into.samples.get(key)
                into.samples[key] = sample if before is None else _combined(into, before, sample)
    return together


def without_rounding(snapshot: Snapshot, before: Snapshot) -> Snapshot:
    """Sums that are less than they were by a rounding error stay: the parts were added in another order."""
    for name, family in only_grown(snapshot).items():
        for key, former in before[name].samples.items() if name in before else ():
            sample = family.samples.get(key)
            if sample is not None and sample.value < former.value and isclose(sample.value, former.value):
                family.samples[key] = sample._replace(value=former.value)
    return snapshot


def _combined(family: Family, before: Sample, sample: Sample) -> Sample:
    exemplars = [one.exemplar for one in (before, sample) if one.exemplar is not None]
    newest = max(exemplars, key=lambda one: one.timestamp or 0.0, default=None)
    value = _COMBINE[_rule(family, sample.name)](float(before.value), float(sample.value))
    return before._replace(value=value, exemplar=newest)


def _rule(family: Family, sample_name: str) -> str:
    if family.grows:
        return "min" if sample_name.endswith(_CREATED) else "sum"
    declared = DECLARED.get(family.name)
    return declared.together if isinstance(declared, Gauge) else _PROCESS_GAUGES.get(family.name, "max")


def metrics(snapshot: Snapshot) -> Iterator[Metric]:
    """The metrics in the form that the exposition takes."""
    for family in snapshot.values():
        made = Metric(family.name, family.documentation, family.kind)
        made.samples = _in_order(family)
        yield made


def _in_order(family: Family) -> list[Sample]:
    """Samples of one series beside each other, as the text formats want them: a series may have come from one process."""
    series: dict[Labels, list[Sample]] = {}
    for (_, labels), sample in family.samples.items():
        own = tuple(label for label in labels if label[0] != "le")
        series.setdefault(own, []).append(sample)
    return [sample for samples in series.values() for sample in samples]
