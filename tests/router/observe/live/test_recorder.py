"""KV between pairs of workers: what a router keeps of it and publishes stays small in a fleet of any size."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.membership.types import WorkerInfo
from router.observe.live import report
from router.observe.live.history import TICK_SECONDS, History
from router.observe.live.report import IDLE_SECONDS, Counts, PairTraffic, Recorder, RouterReport
from router.placement.types import Placed
from wire import common_pb2

INFO = WorkerInfo("", 1, 0, "prefill", "m", "h:1", "", b"", "", "h", 4096, 1000)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(clock=clock)


def move(recorder: Recorder, p: str, d: str, size: int = 10) -> None:
    placed = Placed(replace(INFO, worker_id=p), replace(INFO, worker_id=d, role="decode"), 0, 0, True)
    recorder.handed_over(placed, common_pb2.WorkReport(kv_bytes_shipped=size))


def test_pairs_that_move_nothing_are_deleted_but_the_last(recorder: Recorder, clock: Clock) -> None:
    move(recorder, "p", "a")
    move(recorder, "p", "b")
    clock.now += IDLE_SECONDS - 1
    move(recorder, "p", "a")
    recorder.delete_idle()
    assert recorder.flows == {("p", "b"): PairTraffic(10, 1), ("p", "a"): PairTraffic(20, 2)}
    clock.now += 2
    recorder.delete_idle()
    assert recorder.flows == {("p", "a"): PairTraffic(20, 2)}
    clock.now += 1000
    recorder.delete_idle()
    assert recorder.flows == {("p", "a"): PairTraffic(20, 2)}, "that there were hand-offs is known"
    move(recorder, "p", "b")
    recorder.delete_idle()
    assert recorder.flows == {("p", "b"): PairTraffic(10, 1)}, "it begins at 0 again"


def test_beyond_the_limit_the_pair_that_was_idle_longest_makes_room(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the newest: it moves something, and would be missing in the rate of the whole cluster."""
    monkeypatch.setattr(report, "MAX_PAIRS", 3)
    for d in ("a", "b", "c", "a", "d"):
        move(recorder, "p", d)
    assert recorder.flows == {
        ("p", "c"): PairTraffic(10, 1),
        ("p", "a"): PairTraffic(20, 2),
        ("p", "d"): PairTraffic(10, 1),
    }
    recorder.keep_only({"d"})
    move(recorder, "p", "e")
    recorder.delete_idle()
    assert set(recorder.flows) == {("p", "d"), ("p", "e")}


def test_rates_count_every_hand_off_whatever_is_deleted(recorder: Recorder, clock: Clock) -> None:
    history, moved = History(), 0.0
    for tick in range(30):
        for n in range(5):
            move(recorder, "p", f"d{(7 * tick + 3 * n) % 11 if tick % 9 else 0}")
        recorder.delete_idle()
        counts = Counts(flows=dict(recorder.flows))
        history.tick(clock.now, {"a": RouterReport("ready", clock.now, 0, counts)})
        clock.now += TICK_SECONDS
        if tick > 10:
            moved = sum(flow.handoffs_per_second for flow in history.flows().values())
            assert moved == pytest.approx(5 / TICK_SECONDS)
            assert history.recent().kv_bytes_per_second == pytest.approx(50 / TICK_SECONDS)
    assert len(recorder.flows) <= 11
