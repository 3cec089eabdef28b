from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.membership.status import WorkerStatus
from cluster.membership.types import WorkerInfo
from router.observe.live.worker_rates import RatesOfWorkers, WorkerRates

WORKER = WorkerInfo(
    worker_id="decode-1",
    epoch=1,
    slot=1,
    role="decode",
    model_id="m",
    address="",
    metrics_address="",
    layout=b"",
    place="",
    host="",
    max_model_len=128,
    blocks_total=8,
)


def worker(**status: Any) -> WorkerInfo:
    return replace(WORKER, status=WorkerStatus(**status))


def test_rates_come_from_counters_of_the_last_ten_seconds() -> None:
    rates = RatesOfWorkers()
    for second in range(0, 31, 2):
        # Fast for the first twenty seconds, half as fast afterwards.
        tokens = 10 * min(second, 20) + 5 * max(0, second - 20)
        rates.tick(float(second), [worker(output_tokens=tokens, handoffs=second)])
    of = rates.of(WORKER)
    assert of.output_tokens_per_second == pytest.approx(5.0)
    assert of.handoffs_per_second == pytest.approx(1.0)


def test_the_hit_ratio_is_recent_where_something_came() -> None:
    rates = RatesOfWorkers()
    rates.tick(0.0, [worker(prompt_tokens_cached=0, prompt_tokens_computed=1000)])
    assert rates.of(WORKER).prefix_hit_ratio == 0.0
    rates.tick(2.0, [worker(prompt_tokens_cached=30, prompt_tokens_computed=1010)])
    assert rates.of(WORKER).prefix_hit_ratio == pytest.approx(0.75)


def test_a_new_life_counts_from_nothing_and_a_stranger_has_no_rates() -> None:
    rates = RatesOfWorkers()
    rates.tick(0.0, [worker(output_tokens=1000)])
    again = replace(worker(output_tokens=4), epoch=2)
    rates.tick(2.0, [again])
    rates.tick(4.0, [replace(again, status=WorkerStatus(output_tokens=10))])
    assert rates.of(again).output_tokens_per_second == pytest.approx(3.0)
    assert rates.of(WORKER) == WorkerRates()


def test_a_worker_without_a_status_has_no_rates() -> None:
    rates = RatesOfWorkers()
    for second in (0.0, 2.0):
        rates.tick(second, [worker()])
    assert rates.of(WORKER) == WorkerRates()
