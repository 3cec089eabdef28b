"""A few hundred of the cancels of which `python -m tests.chaos.cancels` makes ten thousand."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.cancels import Cancels, run_cancels
from tests.chaos.chaos_cluster import run_chaos_cluster

COUNT = 300


@pytest.mark.timeout(240)
def test_cancelled_requests_leave_nothing_behind(checkpoint, tmp_path):
    seen = Cancels()
    with run_chaos_cluster(tmp_path / "chaos", checkpoint("llama"), replicas=1) as cluster:
        asyncio.run(run_cancels(cluster.target, COUNT, "short", 60, seen))
    assert seen.cancelled >= COUNT
    assert not seen.leaks
    assert not seen.errors
    assert seen.before_first_token > COUNT // 10, "hardly any met the hand-off"
    assert seen.tokens > COUNT, "hardly any met decoding"
