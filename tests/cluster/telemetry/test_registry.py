"""Metrics as scrapers see them: constant labels on everything, labelled readings, vLLM's names on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.config.shared import MetricsAliases
from cluster.telemetry.histogram import STAGE_SECONDS, HistogramFamily
from cluster.telemetry.metrics.declaration import Counter, Gauge
from cluster.telemetry.registry import Registry
from cluster.telemetry.scrape import ScrapeCollector


def _samples(registry: Registry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _registry(aliases: MetricsAliases = "none") -> Registry:
    registry = Registry({"worker": "w1", "role": "decode"}, aliases=aliases, model="m")
    stages = HistogramFamily("baton_stage_seconds", "Stages", STAGE_SECONDS, ["stage"])
    stages.of("prefill_queue").observe(0.2)
    stages.of("placement").observe(0.1)
    live: dict[tuple[str, ...], float] = {("decode", "live"): 2}
    readings = [
        Gauge(("decode",), "baton_requests_running", "requests", "Running").read(lambda: 3),
        Counter(("decode",), "baton_parts_total", "parts", "Parts", "reason").read(
            lambda: {"late": 1, "stale": 0}
        ),
        Gauge(("decode",), "baton_workers", "workers", "Workers", "of", "lease").read(lambda: live),
    ]
    registry.add([ScrapeCollector(readings), stages])
    return registry


def test_constant_labels_are_on_everything() -> None:
    samples = _samples(_registry())
    assert all({("worker", "w1"), ("role", "decode")} <= labels for _, labels in samples)
    own = frozenset({("worker", "w1"), ("role", "decode")})
    assert samples["baton_requests_running", own] == 3
    assert samples["baton_parts_total", own | {("reason", "late")}] == 1
    assert samples["baton_parts_total", own | {("reason", "stale")}] == 0
    assert samples["baton_workers", own | {("of", "decode"), ("lease", "live")}] == 2
    assert any(name == "process_cpu_seconds_total" for name, _ in samples)
    assert not any(name.startswith("vllm:") for name, _ in samples)


def test_aliases_show_the_same_under_vllms_names() -> None:
    samples = _samples(_registry("vllm"))
    own = frozenset({("worker", "w1"), ("role", "decode")})
    assert samples["vllm:num_requests_running", own | {("model_name", "m")}] == 3
    queue = {
        name: value for (name, _), value in samples.items() if name.startswith("vllm:request_queue_time")
    }
    assert queue["vllm:request_queue_time_seconds_count"] == 1
    assert queue["vllm:request_queue_time_seconds_sum"] == pytest.approx(0.2)
    assert ("baton_requests_running", own) in samples


def test_a_table_that_grows_while_it_is_read_is_read_again() -> None:
    class Growing(dict[str, float]):
        reads = 0

    table = Growing(a=1.0)

    def read() -> Mapping[str, float]:
        table.reads += 1
        if table.reads == 1:
            raise RuntimeError("dictionary changed size during iteration")
        return table

    def twice() -> Iterator[tuple[tuple[str, ...], float]]:
        yield from Gauge(("decode",), "g", "", "G", "label").read(read).samples()

    assert list(twice()) == [(("a",), 1.0)]
    assert table.reads == 2
