"""A whole day of the Azure conversation trace: objectives, cost, number of changes and budget (bench/autoscaling)."""

from __future__ import annotations

import numpy as np
import pytest

from bench.autoscaling.day import HOURS, Requests, make_day, read_trace
from bench.autoscaling.experiment import (
    ATTAINMENT,
    CONFIG,
    ITL_SECONDS,
    TTFT_SECONDS,
    Run,
    run_policy,
    run_static,
    smallest_static,
)
from bench.autoscaling.service_times import ServiceTimes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def day() -> Requests:
    return make_day()


@pytest.fixture(scope="module")
def run(day: Requests) -> Run:
    return run_policy(day, HOURS, start=(6, 3))


def test_the_day_is_the_trace_s_and_the_same_everywhere(day: Requests) -> None:
    trace = read_trace()
    assert len(trace) == 19_366
    assert abs(trace.prompt.mean() - 1154.7) < 0.1
    assert abs(trace.output.mean() - 211.1) < 0.1
    assert len(day) == 335_513
    assert np.all(np.diff(day.arrival) >= 0)


def test_service_times_are_the_measured_ones() -> None:
    """The figures of docs/results.md that they were fitted to."""
    times = ServiceTimes()
    assert times.prefill_seconds(2048) == pytest.approx(2.611, rel=0.01)
    assert times.step_seconds(1, 128) == pytest.approx(0.014, rel=0.01)
    assert times.step_seconds(8, 8 * 512) == pytest.approx(0.027, rel=0.01)
    assert times.step_seconds(16, 16 * 128) == pytest.approx(16 / 499, rel=0.01)


def test_objectives_at_the_cost_of_hindsight(day: Requests, run: Run) -> None:
    attained = run.outcome.attainment(TTFT_SECONDS, ITL_SECONDS)
    static = smallest_static(day, HOURS)
    smaller = run_static(day, HOURS, static.prefill - 1, static.decode)
    print(f"attained {attained:.4f}, {run.outcome.gpu_hours:.0f} GPU hours")
    print(f"{static.prefill}+{static.decode}: {static.outcome.gpu_hours:.0f} GPU hours")
    assert smaller.attainment(TTFT_SECONDS, ITL_SECONDS) < ATTAINMENT
    assert static.outcome.attainment(TTFT_SECONDS, ITL_SECONDS) >= ATTAINMENT
    assert attained >= ATTAINMENT
    assert run.outcome.gpu_hours <= 1.25 * static.outcome.gpu_hours


def test_no_oscillation_outside_ramps(day: Requests, run: Run) -> None:
    calm = run.calm_changes(day, HOURS)
    assert len(calm) >= 18, "most hours are no ramps"
    assert max(calm) <= 6


def test_the_budget_holds_all_day(run: Run) -> None:
    assert max(run.gpus_held) <= CONFIG.gpu_budget
    assert max(run.gpus_asked) <= CONFIG.gpu_budget


def test_a_tight_budget_is_kept_too() -> None:
    """Three busy hours with fewer GPUs than are needed: the objectives suffer, the budget does not, and both pools
    get their part."""
    config = CONFIG.model_copy(update={"gpu_budget": 14})
    run = run_policy(make_day(hours=3, first_hour=9), 3, start=(6, 3), config=config)
    assert max(run.gpus_held) <= 14
    prefill, decode = run.ready[-1]
    assert prefill >= 7
    assert decode >= 3
