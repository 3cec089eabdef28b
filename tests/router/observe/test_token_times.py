"""The time between tokens is counted once, in every place that shows it, though a turn's gaps are counted together."""

from __future__ import annotations

import asyncio

from cluster.telemetry.metrics import router as metrics
from router.observe.live.report import Recorder
from router.observe.token_times import TokenTimes


async def test_every_gap_of_a_turn_is_counted_once() -> None:
    recorder, histogram = Recorder(), metrics.ITL.create()
    times = TokenTimes(recorder, histogram)
    times.first(0.2)
    times.first(None)
    gaps = [0.001, 0.03, 0.03, 7.0]
    for gap in gaps[:3]:
        times.gap(gap, "")
    await asyncio.sleep(0)
    times.gap(gaps[3], "")
    await asyncio.sleep(0)
    assert recorder.output_tokens == 6
    assert recorder.ttft.count == 1 and recorder.itl.count == histogram.count == 4
    assert histogram.sum == sum(gaps)
    one, other = Recorder(), metrics.ITL.create()
    for gap in gaps:
        one.itl.add(gap)
        other.observe(gap)
    assert recorder.itl.counts == one.itl.counts and histogram.counts == other.counts


async def test_a_traced_token_is_its_buckets_exemplar_and_counted_once() -> None:
    histogram = metrics.ITL.create()
    times = TokenTimes(Recorder(), histogram)
    times.gap(0.03, "trace")
    await asyncio.sleep(0)
    shown = [bucket for bucket in histogram.buckets() if len(bucket) == 3]
    assert [(bucket[0], bucket[2].labels) for bucket in shown] == [("0.03", {"trace_id": "trace"})]
    assert histogram.count == 1


async def test_the_gaps_of_a_turn_end_at_one_time() -> None:
    """Equal ones are counted together. A later turn has another time."""
    times = TokenTimes(Recorder(), metrics.ITL.create())
    now = times.now()
    times.gap(0.03, "")
    assert times.now() == now
    await asyncio.sleep(0)
    while times.now() == now:  # the clock's resolution
        pass
