"""How a worker reacts to silent ranks: when it stops sending beats, and when it fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.protocol.times import LOST_SECONDS, RANK_QUIET_SECONDS
from engine.parallel.group import Arrivals
from tests.harness.virtual_time import VirtualLoop
from tests.worker.fake_rank import FakeRank
from worker.ranks.watch import RankWatch

PATIENCE = 30.0


class Watched:
    """A watch over two ranks, on a loop with virtual time."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.ranks = [FakeRank(1), FakeRank(2)]
        self.watch = RankWatch(self.ranks, Arrivals())
        self.failures: list[BaseException] = []
        self.task = self.loop.create_task(self.watch.run(self.failures.append, PATIENCE, self.loop.time))

    def close(self) -> None:
        self.task.cancel()
        self.loop.run(asyncio.wait([self.task]))
        self.loop.close()


@pytest.fixture
def watched():
    one = Watched()
    yield one
    one.close()


def test_without_further_ranks_all_is_well():
    watch = RankWatch([], Arrivals())
    assert watch.prompt() and watch.healthy() and watch.silent_seconds() == 0.0


def test_the_rank_that_is_silent_longest_decides():
    ranks = [FakeRank(1, 0.1), FakeRank(2, 0.1)]
    watch = RankWatch(ranks, Arrivals())
    assert watch.prompt() and watch.healthy()
    ranks[1].silent = RANK_QUIET_SECONDS
    assert not watch.prompt() and watch.healthy()
    ranks[1].silent, ranks[0].silent = 0.1, LOST_SECONDS
    assert not watch.prompt() and not watch.healthy()


def test_a_failed_rank_is_no_longer_healthy_and_fails_its_worker(watched):
    watched.ranks[1].failure = "rank 2 has died"
    assert not watched.watch.healthy()
    watched.loop.pass_time(1.0)
    assert [str(one) for one in watched.failures] == ["rank 2 has died"]
    assert watched.task.done()


def test_a_rank_that_stays_silent_fails_its_worker_in_the_end(watched):
    watched.ranks[0].silent = 1000.0
    watched.loop.pass_time(PATIENCE - 1.0)
    assert not watched.failures
    watched.loop.pass_time(2.0)
    assert "rank 1 has been silent for 30 s" in str(watched.failures[0])


def test_only_uninterrupted_silence_counts(watched):
    """A leader that was stopped itself sees only old beats at first."""
    for _ in range(4):
        watched.ranks[0].silent = 1000.0
        watched.loop.pass_time(PATIENCE - 2.0)
        watched.ranks[0].silent = 0.0
        watched.loop.pass_time(2.0)
    assert not watched.failures


def test_time_in_which_the_leader_itself_was_stopped_does_not_count():
    """It may have seen its rank stop a moment before."""
    loop, rank, stopped = VirtualLoop(), FakeRank(1, silent=1.0), [0.0]
    failures: list[Any] = []
    watch = RankWatch([rank], Arrivals())
    task = loop.create_task(watch.run(failures.append, PATIENCE, lambda: loop.time() + stopped[0]))
    loop.pass_time(2.0)
    stopped[0] = 1000.0
    loop.pass_time(1.0)
    assert not failures
    loop.pass_time(PATIENCE)
    assert len(failures) == 1 and task.done()
    loop.close()


def test_silences_of_different_ranks_are_not_added(watched):
    watched.ranks[0].silent = 1000.0
    watched.loop.pass_time(PATIENCE - 2.0)
    watched.ranks[0].silent, watched.ranks[1].silent = 0.0, 1000.0
    watched.loop.pass_time(PATIENCE - 2.0)
    assert not watched.failures


def test_only_the_silent_ones_are_killed():
    ranks = [
        FakeRank(1, LOST_SECONDS - 0.1),
        FakeRank(2, LOST_SECONDS),
        FakeRank(3, failure="rank 3 has died"),
    ]
    RankWatch(ranks, Arrivals()).kill_silent(LOST_SECONDS)
    assert [rank.killed for rank in ranks] == [False, True, True]


@pytest.mark.parametrize(("silent", "killed"), [(0.1, False), (1000.0, False), (1299.0, True)])
def test_a_leader_that_was_stopped_while_it_warmed_up_adds_that_time_to_the_limit(silent, killed):
    """After 1000 s, no beat of that time has been read yet, or the rank was stopped as well."""
    rank, now = FakeRank(1, 299.0), [0.0]
    looks = iter([(0.5, 299.0), (1000.0, silent), (0.5, silent)])

    class Over:
        def wait(self, seconds: float) -> bool:
            passed, rank.silent = next(looks, (0.0, rank.silent))
            now[0] += passed
            return not passed

    over: Any = Over()
    RankWatch([rank], Arrivals()).kill_silent_until(over, 300.0, lambda: now[0])
    assert rank.killed is killed
