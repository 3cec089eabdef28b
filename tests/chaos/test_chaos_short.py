"""One fault of each of the commonest kinds, on a whole cluster under load. `make chaos` has the long runs."""

from __future__ import annotations

import dataclasses

import pytest

from tests.chaos.rows import ANY_MOMENT, draw_fault
from tests.chaos.short_run import assert_recovered, run_short
from tests.harness.bounds import PLACEMENT_BACK_SECONDS, allowed

SEED = "short"
# (row, point)
FAULTS = (
    ("kill decode, decoding", "decode.tokens"),
    ("corrupt", "landing.landed"),
    ("kill prefill", "sender.written"),
    ("double message", "message.committed"),
    ("stop decode", "landing.landed"),
    ("kill decode, uncommitted", "decode.committing"),
    ("cut prefill–decode", ANY_MOMENT),
    ("kill router", "router.token"),
    ("kill redis", ANY_MOMENT),
)
HOLD_SECONDS = 5.5  # lost, and found again
LATE_SECONDS = 0.3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_faults_lose_no_token_break_no_stream_and_leave_nothing(checkpoint, tmp_path):
    schedule = [
        dataclasses.replace(
            draw_fault(SEED, number, [row]),
            point=point,
            at=1 + number % 3,
            way="both" if row.startswith("cut") else "",
            hold_seconds=LATE_SECONDS if "message" in row else HOLD_SECONDS,
        )
        for number, (row, point) in enumerate(FAULTS)
    ]
    results = run_short(tmp_path, checkpoint("llama"), SEED, schedule)
    assert [(result.fault, result.point) for result in results] == list(FAULTS)
    for result in results:
        assert_recovered(result)
        assert result.placement_back <= allowed(PLACEMENT_BACK_SECONDS), result
