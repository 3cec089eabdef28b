"""The metrics of a process: those of its collectors, of the process itself, and aliases if configured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cluster.config.shared import MetricsAliases
from cluster.telemetry.metrics import process
from cluster.telemetry.scrape import ScrapeCollector
from cluster.telemetry.vllm_names import vllm_aliases


class Registry(CollectorRegistry):
    """`constant` labels are added to every sample."""

    def __init__(
        self, constant: Mapping[str, str] | None = None, *, aliases: MetricsAliases = "none", model: str = ""
    ):
        super().__init__()
        self._constant = dict(constant or {})
        self._aliases = aliases
        self._model = model
        version = _version()
        self.register(ScrapeCollector([process.BUILD_INFO.read(lambda: {version: 1.0})]))
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


def _version() -> str:
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:  # run from its source tree
        return "unknown"
