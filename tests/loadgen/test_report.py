from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from rich.console import Console

from loadgen.config import LoadConfig, Slo
from loadgen.html import page, rate_over_time
from loadgen.record import Failure, RequestRecord
from loadgen.report import Report, merge, summarise
from loadgen.svg import value_axis
from loadgen.table import print_report, totals
from wire.inference_pb2 import Timings

NO_SLO = Slo()


def record(intended: float, *arrivals: float, **settings: Any) -> RequestRecord:
    settings.setdefault("usage_tokens", len(arrivals))
    return RequestRecord("grpc", 0, 0, intended, arrivals=[(at, 1) for at in arrivals], **settings)


def report(*records: RequestRecord, slo: Slo = NO_SLO, started: float = 0.0) -> Report:
    for item in records:
        item.slo = slo
    return Report((LoadConfig(requests=len(records) or 1, slo=slo),), list(records), started)


def test_latencies_count_from_the_intended_time() -> None:
    item = record(1.0, 1.5, 1.6, 1.8, sent=1.4)
    assert item.ttft == pytest.approx(0.5)
    assert item.e2e == pytest.approx(0.8)
    assert item.tpot == pytest.approx(0.3 / 2)
    assert item.gaps == pytest.approx([0.1, 0.2])


def test_tokens_that_come_together_share_a_gap_but_count_each() -> None:
    item = RequestRecord("grpc", 0, 0, 0.0, arrivals=[(1.0, 1), (2.0, 4)])
    assert item.output_tokens == 5
    assert item.gaps == [1.0]
    assert item.tpot == pytest.approx(0.25)


def test_a_single_token_has_no_tpot() -> None:
    assert record(0.0, 1.0).tpot is None
    assert report(record(0.0, 1.0)).tpot.count == 0


def test_goodput_counts_failures_as_offered() -> None:
    slo = Slo(ttft_seconds=1.0, tpot_seconds=0.5, e2e_seconds=3.0)
    failed = RequestRecord("grpc", 0, 0, 0.0, failure=Failure("deadline"))
    found = report(
        record(0.0, 0.5, 0.9),
        record(0.0, 1.5, 1.6),
        record(0.0, 0.5, 1.5),
        record(0.0, 0.5, 3.2),
        failed,
        slo=slo,
    )
    assert found.goodput == pytest.approx(1 / 5)
    assert (found.requests, found.failed, found.errors) == (5, 1, {"deadline": 1})


def test_throughput_spans_from_the_first_due_to_the_last_token() -> None:
    found = report(record(1.0, 2.0, 3.0), record(2.0, 4.0, 5.0))
    assert found.seconds == pytest.approx(4.0)
    assert found.output_tokens_per_second == pytest.approx(1.0)


def test_figures_of_the_server_are_summed_or_averaged() -> None:
    timings = Timings(kv_bytes_shipped=10, transport="nixl", attempts=2, placement_calls=2)
    local = Timings(attempts=1, placement_calls=1)
    found = report(
        record(0, 1, timings=timings, stages={"prefill_seconds": 0.2}, cached_tokens=3),
        record(0, 1, timings=local, stages={"prefill_seconds": 0.4}),
    ).to_json()
    assert (found["kv_bytes_shipped"], found["kv_shipped_requests"], found["transport"]) == (10, 1, "nixl")
    assert found["placement_calls_per_request"] == 1.5
    assert found["attempts_per_request"] == 1.5
    assert found["stages"]["prefill_seconds"] == pytest.approx(0.3)
    assert found["cached_tokens"] == 3


def test_a_run_in_which_nothing_was_handed_over_says_why() -> None:
    def told(*timings: Timings) -> str:
        return report(*(record(0, 1, timings=one) for one in timings)).no_handoff

    assert told(Timings(decode_worker="d")).startswith("decode workers computed all prompts")
    assert "answers ended with their first token" in told(Timings(prefill_worker="p")), "max_tokens: 1"
    assert "cached" in told(Timings(prefill_worker="p", decode_worker="d"))
    assert told(Timings(decode_worker="d"), Timings(prefill_worker="p", kv_bytes_shipped=1)) == ""
    assert report(record(0, 1)).no_handoff == "", "another server tells nothing"
    shown = dict(totals(report(record(0, 1, timings=Timings(decode_worker="d")))))
    assert shown["handed over"].startswith("nothing: decode workers")


def test_merge_lays_runs_side_by_side() -> None:
    merged = merge([report(record(0.0, 1.0), started=100.0), report(record(0.0, 1.0), started=105.0)])
    assert [item.intended for item in merged.records] == [0.0, 5.0]
    assert merged.seconds == pytest.approx(6.0)
    assert merged.ttft.max == pytest.approx(1.0)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [RequestRecord("grpc", 0, 0, 0.0, failure=Failure("x", "<b>"))],
        [record(0.0, 1.0)],
        [record(0.0, 1.0, 1.0), record(0.0, 1000.0, 1000.001)],
        [record(0.0, 0.0, 0.0)],
    ],
)
def test_every_report_can_be_shown(records: list[RequestRecord]) -> None:
    found = report(*records)
    orjson.dumps(found.to_json())
    shown = page(found)
    assert "<b>" not in shown
    assert "nan" not in shown
    print_report(found, Console(quiet=True))


def test_text_of_samples_is_escaped() -> None:
    item = record(0.0, 1.0, sample_prompt="<script>", sample_answer="</pre>")
    assert "<script>" not in page(report(item))


def test_the_page_loads_nothing() -> None:
    shown = page(report(record(0.0, 1.0, 2.0)))
    assert "http" not in shown.replace("http-equiv", "")
    assert "<script" not in shown


def test_a_summary_has_median_largest_and_count() -> None:
    assert summarise([]).count == 0
    found = summarise([float(value) for value in range(1, 101)])
    assert (found.p50, found.max, found.count) == (50.5, 100.0, 100)


def test_rate_over_time_keeps_the_total() -> None:
    rates = rate_over_time([(0.5, 3.0), (9.9, 7.0)], 10)
    assert sum(rate for _, rate in rates) * 0.99 == pytest.approx(10.0)


def test_axes_have_a_few_ticks_within_their_range() -> None:
    for values in ([0.011, 0.013], [0.0], [1e-4, 10.0], [1e-6, 1e6], [0.001, 0.04], [5.0]):
        for from_zero in (False, True):
            axis = value_axis(values, 0, 100, from_zero=from_zero)
            ticks = axis.ticks()
            assert 2 <= len(ticks) <= 16
            assert all(-1e-6 <= axis(tick) <= 100 + 1e-6 for tick in ticks)
            assert all(math.isfinite(axis(value)) for value in values)
