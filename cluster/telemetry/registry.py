"""What a process shows at /metrics: its collectors' metrics, the process's own, and aliases where they are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.config.shared import MetricsAliases
from cluster.telemetry.vllm_names import vllm_aliases


class Registry(CollectorRegistry):
    """`constant` labels go on every sample."""

    def __init__(
        self, constant: Mapping[str, str] | None = None, *, aliases: MetricsAliases = "none", model: str = ""
    ):
        super().__init__()
        self._constant = dict(constant or {})
        self._aliases = aliases
        self._model = model
        self.register(_Build())
        ProcessCollector(registry=self)

    def add(self, collectors: Iterable[Collector]) -> None:
        for collector in collectors:
            self.register(collector)

    def collect(self) -> Iterator[Metric]:
        metrics = list(super().collect())
        if self._aliases == "vllm":
            metrics += vllm_aliases(metrics, self._model)
        for metric in metrics:
            if self._constant:
                metric.samples = [
                    sample._replace(labels={**self._constant, **sample.labels}) for sample in metric.samples
                ]
            yield metric


class _Build(Collector):
    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("baton_build_info", "Always 1; the version is a label", labels=["version"])
        build.add_metric([_version()], 1.0)
        yield build


def _version() -> str:
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:  # run from its source tree
        return "unknown"
