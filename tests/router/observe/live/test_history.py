from __future__ import annotations

import pytest

from router.observe.live.histogram import LatencyHistogram
from router.observe.live.history import POINTS, TICK_SECONDS, History
from router.observe.live.report import Counts, PairTraffic, Requests, RouterReport, decode, encode

PAIR = ("prefill-1", "decode-1")


def report(uptime: float, requests: int = 0, tokens: int = 0, ttft: float | None = None) -> RouterReport:
    """A router that has served so many requests, all alike."""
    histogram = LatencyHistogram()
    for _ in range(requests):
        if ttft is not None:
            histogram.add(ttft)
    counts = Counts(
        Requests(ok=requests),
        prompt_tokens=10 * requests,
        cached_tokens=4 * requests,
        output_tokens=tokens,
        ttft=histogram,
        flows={PAIR: PairTraffic(1024 * requests, requests)} if requests else {},
    )
    return RouterReport("ready", uptime, 3, counts)


def test_a_report_survives_its_way_through_redis() -> None:
    sent = report(5.0, 7, 90, 0.1)
    got = decode(encode(sent))
    assert got is not None
    assert got.counts.requests == Requests(7) and got.counts.output_tokens == 90
    assert got.counts.ttft.counts == sent.counts.ttft.counts
    assert got.counts.flows == {PAIR: PairTraffic(7168, 7)}
    assert (got.state, got.uptime_seconds, got.in_flight) == ("ready", 5.0, 3)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'"x"', b'{"state": 1}', b"\xff", b"7"])
def test_another_versions_report_is_none(raw: bytes) -> None:
    assert decode(raw) is None


def test_rates_are_of_all_routers_together() -> None:
    history = History()
    for tick in range(4):
        seconds = tick * TICK_SECONDS
        history.tick(
            seconds,
            {
                "a": report(seconds + 9, requests=10 * tick, tokens=100 * tick, ttft=0.1),
                "b": report(seconds + 9, requests=30 * tick, tokens=300 * tick, ttft=0.1),
            },
        )
    now = history.recent()
    assert now.requests_per_second == pytest.approx(20.0)
    assert now.output_tokens_per_second == pytest.approx(200.0)
    assert now.kv_bytes_per_second == pytest.approx(20.0 * 1024)
    assert now.cached_ratio == pytest.approx(0.4)
    assert now.ttft.p50 == pytest.approx(0.1, rel=0.1)
    assert now.itl == (None, None, None)
    assert history.router_rates("b").requests_per_second == pytest.approx(15.0)
    assert history.router_rates("unknown").requests_per_second == 0.0
    assert history.flows()[PAIR].handoffs_per_second == pytest.approx(20.0)


def test_values_before_the_first_reading_are_not_counted() -> None:
    history = History()
    history.tick(0.0, {"a": report(1.0)})
    history.tick(2.0, {"a": report(3.0, 2), "late": report(500.0, 1_000_000)})
    assert history.recent().requests_per_second == pytest.approx(1.0)


def test_a_router_that_starts_again_begins_at_nothing() -> None:
    history = History()
    history.tick(0.0, {"a": report(100.0, 50, 500)})
    history.tick(2.0, {"a": report(1.0, 4, 40)})
    now = history.recent()
    assert now.requests_per_second == pytest.approx(2.0)
    assert now.output_tokens_per_second == pytest.approx(20.0)


def test_rates_forget_after_ten_seconds_and_percentiles_after_a_minute() -> None:
    history = History()
    history.tick(0.0, {"a": report(1.0)})
    for tick in range(1, 40):
        history.tick(tick * TICK_SECONDS, {"a": report(1.0 + tick, 20, ttft=0.5)})
        seconds = tick * TICK_SECONDS
        recent = history.recent()
        assert (recent.requests_per_second > 0) == (seconds <= 10)
        assert (recent.ttft.p99 is not None) == (seconds <= 60)
        assert (history.points[-1].ttft.p99 is not None) == (seconds <= 10)
        assert bool(history.flows()) == (seconds <= 10)


def test_the_past_is_bounded() -> None:
    history = History()
    for tick in range(POINTS + 20):
        history.tick(tick * TICK_SECONDS, {"a": report(tick, tick)})
    assert len(history.points) == POINTS


def test_forgotten_pairs_begin_again() -> None:
    """A router drops pairs of workers that are gone; counts never turn negative by it."""
    before = Counts(flows={PAIR: PairTraffic(1000, 10)})
    assert Counts().since(before).flows == {}
    assert Counts(flows={PAIR: PairTraffic(100, 1)}).since(before).flows == {PAIR: PairTraffic(100, 1)}
