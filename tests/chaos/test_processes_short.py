"""Processes of routers as victims, on a whole cluster under load. `make chaos-processes` has the long runs."""

from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.rows import ANY_MOMENT, draw_fault
from tests.chaos.short_run import assert_recovered, run_short

SEED = "short processes"
PROCESSES = 2
# (row, point)
FAULTS = (
    ("kill router process", "router.token"),
    ("kill router process", "router.placed"),
    ("kill router process", ANY_MOMENT),
    ("stop router process", ANY_MOMENT),
    ("kill router parent", ANY_MOMENT),
)
HOLD_SECONDS = 5.5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_processes_that_die_or_stop_lose_no_token_and_leave_nothing(checkpoint, tmp_path):
    schedule = [
        dataclasses.replace(
            draw_fault(SEED, number, [row]), point=point, at=1 + number, hold_seconds=HOLD_SECONDS
        )
        for number, (row, point) in enumerate(FAULTS)
    ]
    results = run_short(tmp_path, checkpoint("llama"), SEED, schedule, PROCESSES)
    assert [(result.fault, result.point) for result in results] == list(FAULTS)
    for result in results:
        assert_recovered(result)
