"""Metrics of several processes as one router's: nothing falls, nothing is counted twice, gauges go with their process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from cluster.telemetry.exposition import encode
from cluster.telemetry.metrics import router as declared
from router.processes import snapshots
from router.processes.merged_metrics import MergedMetrics, Shown
from router.processes.snapshots import Snapshot
from tests.harness.router_group import Samples, grown, parse


class Process:
    """A process with metrics of its own. `answers` False: it is stopped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = declared.REQUESTS.create(self.registry, [("m", "ok")])
        family = declared.TTFT.create_family()
        self.registry.register(family)
        self.ttft = family.of("m")
        self.in_flight = declared.REQUESTS_IN_FLIGHT.create(self.registry)
        self.redis_up = declared.REDIS_UP.create(self.registry)
        self.workers = declared.WORKERS.create(self.registry)
        self.answers = True
        self.asked: Callable[[], None] = lambda: None

    async def scrape(self, seconds: float) -> Snapshot | None:
        await asyncio.sleep(0)
        self.asked()
        if not self.answers:
            return None
        return snapshots.decode(json.loads(json.dumps(snapshots.encode(self.registry.collect()))))

    def serve(self, requests: int) -> None:
        self.requests.labels("m", "ok").inc(requests)
        for _ in range(requests):
            self.ttft.observe(0.3, "trace")


OK = "baton_requests_total", (("model", "m"), ("outcome", "ok"))
IN_FLIGHT = "baton_requests_in_flight", ()


async def shown(merged: MergedMetrics) -> Samples:
    body, _ = await merged.encoded("")
    return parse(body.decode())


@pytest.fixture
def merged() -> MergedMetrics:
    return MergedMetrics(CollectorRegistry())


@pytest.fixture
def pair(merged: MergedMetrics) -> tuple[Process, Process]:
    made = Process(), Process()
    for one in made:
        merged.add(one)
    return made


async def test_counters_and_histograms_are_added(
    merged: MergedMetrics, pair: tuple[Process, Process]
) -> None:
    pair[0].serve(2)
    pair[1].serve(3)
    samples = await shown(merged)
    assert samples[OK] == 5
    assert samples["baton_time_to_first_token_seconds_count", (("model", "m"),)] == 5
    assert samples["baton_time_to_first_token_seconds_sum", (("model", "m"),)] == pytest.approx(1.5)
    assert samples["baton_time_to_first_token_seconds_bucket", (("le", "0.25"), ("model", "m"))] == 0
    assert samples["baton_time_to_first_token_seconds_bucket", (("le", "0.5"), ("model", "m"))] == 5


async def test_gauges_are_combined_as_declared(merged: MergedMetrics, pair: tuple[Process, Process]) -> None:
    for process, (in_flight, up, workers) in zip(pair, [(2, 1, 4), (3, 0, 4)], strict=True):
        process.in_flight.set(in_flight)
        process.redis_up.set(up)
        process.workers.labels("m", "decode", "live").set(workers)
    samples = await shown(merged)
    assert samples[IN_FLIGHT] == 5
    assert samples["baton_router_redis_up", ()] == 0
    assert samples["baton_workers", (("lease", "live"), ("model", "m"), ("role", "decode"))] == 4


async def test_what_a_process_that_ended_had_counted_stays(
    merged: MergedMetrics, pair: tuple[Process, Process]
) -> None:
    first, second = pair
    first.serve(2)
    first.in_flight.set(7)
    second.serve(3)
    before = await shown(merged)
    merged.ended(first)
    after = await shown(merged)
    assert grown(after) == grown(before)
    assert after[IN_FLIGHT] == 0, "gauges go"
    successor = Process()
    merged.add(successor)
    assert grown(await shown(merged)) == grown(before), "it counts from 0"
    successor.serve(1)
    assert (await shown(merged))[OK] == 6
    merged.ended(successor)
    merged.ended(successor)
    assert (await shown(merged))[OK] == 6, "kept once"


async def test_a_sum_does_not_fall_by_rounding(merged: MergedMetrics) -> None:
    """0.1 + 0.2 + 0.3 is more than 0.2 + 0.3 + 0.1."""
    processes = [Process() for _ in range(3)]
    for process, seconds in zip(processes, (0.1, 0.2, 0.3), strict=True):
        merged.add(process)
        process.ttft.observe(seconds)
    before = await shown(merged)
    merged.ended(processes[0])
    assert grown(await shown(merged)) == grown(before)
    processes[1].ttft.observe(1.0)
    key = "baton_time_to_first_token_seconds_sum", (("model", "m"),)
    assert (await shown(merged))[key] == pytest.approx(1.6)


def test_what_has_fallen_by_more_than_rounding_is_shown() -> None:
    def one(value: float) -> Snapshot:
        return snapshots.decode([["c", "", "counter", [["c_total", {}, value, None]]]])

    for value, before, shown_value in ((5.0, 10.0, 5.0), (0.6, 0.6000000000000001, 0.6000000000000001)):
        (sample,) = snapshots.without_rounding(one(value), one(before))["c"].samples.values()
        assert sample.value == shown_value


async def test_a_process_that_does_not_answer_counts_as_it_did_last(
    merged: MergedMetrics, pair: tuple[Process, Process]
) -> None:
    first, _ = pair
    first.serve(2)
    first.in_flight.set(7)
    assert (await shown(merged))[OK] == 2
    first.answers = False
    first.serve(1)
    samples = await shown(merged)
    assert (samples[OK], samples[IN_FLIGHT]) == (2, 0)
    first.answers = True
    samples = await shown(merged)
    assert (samples[OK], samples[IN_FLIGHT]) == (3, 7)


async def test_a_process_that_ends_while_it_answers_is_counted_once(
    merged: MergedMetrics, pair: tuple[Process, Process]
) -> None:
    first, _ = pair
    first.serve(2)
    await merged.collect()
    first.serve(5)
    first.asked = lambda: merged.ended(first)
    assert (await shown(merged))[OK] == 2
    assert (await shown(merged))[OK] == 2


async def test_a_series_of_one_process_alone_is_shown_in_order(
    merged: MergedMetrics, pair: tuple[Process, Process]
) -> None:
    """Series that only the second process has do not stand between the parts of others."""
    pair[0].requests.labels("m", "ok").inc()
    pair[1].requests.labels("m", "InternalError").inc()
    for accept in ("", "application/openmetrics-text"):
        body, _ = await merged.encoded(accept)
        names = [
            line.split("{")[0] for line in body.decode().splitlines() if line.startswith("baton_requests_")
        ]
        assert names, accept
    assert (await shown(merged))["baton_requests_total", (("model", "m"), ("outcome", "InternalError"))] == 1


def test_the_newest_exemplar_is_shown() -> None:
    def one(trace: str, at: float) -> Snapshot:
        sample = ["h_bucket", {"le": "1.0"}, 1.0, [{"trace_id": trace}, 0.5, at]]
        return snapshots.decode([["h", "", "histogram", [sample]]])

    for parts in ([one("old", 1.0), one("new", 2.0)], [one("new", 2.0), one("old", 1.0)]):
        (sample,) = snapshots.total(parts)["h"].samples.values()
        assert sample.exemplar is not None and sample.exemplar.labels == {"trace_id": "new"}
        assert sample.value == 2.0


def test_a_series_began_when_its_first_process_began_it() -> None:
    def one(created: float) -> Snapshot:
        return snapshots.decode([["c", "", "counter", [["c_created", {}, created, None]]]])

    (sample,) = snapshots.total([one(5.0), one(3.0), one(4.0)])["c"].samples.values()
    assert sample.value == 3.0


def test_what_goes_through_a_snapshot_is_shown_as_before() -> None:
    process = Process()
    process.serve(3)
    process.in_flight.set(float("inf"))
    raw = json.loads(json.dumps(snapshots.encode(process.registry.collect())))
    for accept in ("", "application/openmetrics-text"):
        assert encode(Shown(snapshots.decode(raw)), accept) == encode(process.registry, accept)


def test_metrics_without_samples_stay() -> None:
    (metric,) = snapshots.metrics(snapshots.decode(snapshots.encode([Metric("g", "help", "gauge")])))
    assert (metric.name, metric.type, metric.samples) == ("g", "gauge", [])
