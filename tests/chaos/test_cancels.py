"""A few of the cancels of `make cancels`."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.cancels import Round, read, run_cancels, summary, verdict
from tests.chaos.chaos_cluster import run_chaos_cluster
from tests.harness.bounds import RECLAIM_SECONDS, allowed

COUNT, TOGETHER = 180, 60
RECOVERY_SECONDS = allowed(RECLAIM_SECONDS)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_cancelled_requests_leave_nothing_behind(checkpoint, tmp_path):
    rounds: list[Round] = []
    with run_chaos_cluster(tmp_path / "chaos", checkpoint("llama"), replicas=1) as cluster:
        while sum(one.cancelled for one in rounds) < COUNT:
            one = run_cancels(cluster.target, "short", len(rounds), TOGETHER, RECOVERY_SECONDS)
            rounds.append(asyncio.run(one))
    assert not [what for one in rounds for what in (*one.leaks, *one.errors)]
    assert max(one.reclaimed_seconds for one in rounds) <= RECOVERY_SECONDS
    early = sum(one.before_first_token for one in rounds)
    assert early > COUNT // 10, "hardly any met the hand-off"
    assert sum(one.tokens for one in rounds) > COUNT, "hardly any met decoding"


def test_the_run_is_judged_by_leaks_errors_and_time(tmp_path):
    good = Round("s", 0, cancelled=60, reclaimed_seconds=1.9)
    slow = Round("s", 1, cancelled=60, reclaimed_seconds=2.1, held_last=["d: attempts = 1"])
    bad = Round("s", 2, cancelled=60, leaks=["2 blocks held"], errors=["InternalError: x"])
    assert not verdict([good])
    assert verdict([good, slow]) == ["round 1: reclaimed after 2.10 s, at last d: attempts = 1"]
    assert len(verdict([good, bad])) == 2
    assert "120 cancelled" in summary([good, slow])
    assert "max 2.10 s" in summary([good, slow])
    assert not read(tmp_path / "none.jsonl", "s")
