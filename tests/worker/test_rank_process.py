"""The leader's end of a rank in another process: no behaviour of the rank blocks the leader."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.worker import EngineConfig, WorkerConfig
from cluster.errors import InternalError, SetupError
from cluster.protocol.times import RANK_QUIET_SECONDS
from engine.parallel.group import Arrivals
from engine.warm_up import say
from tests.harness.waiting import wait_for
from tests.worker.echo_rank import BREAK, HANG, HELLO, Echo
from tests.worker.fake_rank import FakeRank, Reports
from wire.handoff_pb2 import PartData
from worker.loaded_engine import LoadedEngine
from worker.ranks import ranks, watch
from worker.ranks.pipe import KINDS_DIGEST, RankPipe, Ready
from worker.ranks.process import START_SECONDS, RankOutbox, RemoteRank, StartingRank, spawn_rank
from worker.ranks.rank_main import serve_pipe
from worker.ranks.ranks import Ranks
from worker.ranks.watch import RankWatch

BIG = PartData(payload=bytes(100_000))  # more than a pipe holds
MANY = 64


def pipes() -> tuple[RankPipe[Any, Any], RankPipe[Any, Any]]:
    ours, theirs = Pipe()
    return RankPipe(ours), RankPipe(theirs)


def small(size: int) -> PartData:
    return PartData(payload=bytes(size))


def sizes(events: list[Any]) -> list[int]:
    return [event.rank for event in events]


def pid_of(remote: RemoteRank[Any, Any]) -> int:
    process: Any = remote._process
    return int(process._process.pid)


def rank_main(rank: int, connection: Connection, arrived: int) -> None:
    arrivals = Arrivals()
    for _ in range(arrived):
        arrivals.arrive()
    serve_pipe(RankPipe(connection), Echo(), HELLO, arrivals)
    threading.Event().wait()


@contextlib.contextmanager
def spawned(arrived: int = 0) -> Iterator[tuple[RemoteRank[Any, Any], list[Any], Reports]]:
    """A rank, with its events and failures."""
    reports = Reports()
    remote = spawn_rank(1, rank_main, arrived).wait_ready(reports)
    said: list[Any] = []
    remote.start(said.append)
    try:
        yield remote, said, reports
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(remote), signal.SIGCONT)
        remote.kill()


async def test_a_rank_that_does_not_read_holds_up_neither_the_loop_nor_its_timers():
    with spawned() as (remote, said, _):
        os.kill(pid_of(remote), signal.SIGSTOP)
        fired = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, fired.set)
        for number in range(MANY):
            remote.handle(small(number))
            remote.handle(BIG)
        await asyncio.wait_for(fired.wait(), 10)
        assert remote.silent_seconds(Arrivals()) < math.inf
        os.kill(pid_of(remote), signal.SIGCONT)
        await asyncio.to_thread(wait_for, lambda: len(said) == 2 * MANY, 30.0, "all of it has arrived")
        assert sizes(said) == [what for number in range(MANY) for what in (number, len(BIG.payload))]


def test_a_rank_that_lets_too_many_messages_pile_up_has_failed():
    pipe, theirs = pipes()
    outbox = RankOutbox(pipe, "outbox", max_messages=3)
    reports = Reports()
    remote: Any = RemoteRank(1, pipe, NoProcess(), HELLO, reports, outbox)
    for _ in range(3):
        remote.handle(BIG)
    assert not reports.failures and not remote.failure
    for _ in range(3):
        remote.handle(BIG)
    assert reports.said == [remote.failure] and "does not read its messages" in remote.failure
    assert remote.silent_seconds(Arrivals()) == math.inf
    theirs.close()


class NoProcess:
    def __init__(self) -> None:
        self.killed = False

    def end(self, seconds: float) -> None:
        return

    def kill(self) -> None:
        self.killed = True


def test_a_stopped_rank_is_silent_until_it_wakes():
    with spawned() as (remote, _, reports):
        leader = Arrivals()
        assert remote.silent_seconds(leader) < RANK_QUIET_SECONDS
        os.kill(pid_of(remote), signal.SIGSTOP)
        wait_for(lambda: remote.silent_seconds(leader) > RANK_QUIET_SECONDS, 30.0, "it is silent")
        os.kill(pid_of(remote), signal.SIGCONT)
        wait_for(lambda: remote.silent_seconds(leader) < RANK_QUIET_SECONDS, 30.0, "it is no longer silent")
        assert not reports.failures


def test_a_rank_that_beats_but_reads_nothing_is_silent():
    with spawned() as (remote, _, reports):
        remote.handle(HANG)
        for _ in range(MANY):
            remote.handle(BIG)
        wait_for(lambda: remote.silent_seconds(Arrivals()) > 2.0, 30.0, "a write makes no progress")
        assert not reports.failures


def test_a_rank_whose_main_thread_does_not_enter_an_operation_is_silent():
    """Although it beats and reads."""
    with spawned(arrived=2) as (remote, said, _):
        clock = Clock()
        leader = Arrivals(clock)
        leader.arrive()
        leader.arrive()
        remote.handle(small(1))
        wait_for(lambda: said, 30.0, "it has responded")
        remote._clock = clock  # what follows is decided by the leader's own clock
        remote._responded = clock()
        clock.now += 60.0
        remote._responded = clock()
        assert remote.silent_seconds(leader) == 0.0, (
            "it has come to all that the leader has come to: a long step"
        )
        leader.arrive()
        clock.now += 3.0
        remote._responded = clock()
        assert remote.silent_seconds(leader) == 3.0, "the leader waits for it at the third one"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_that_ends_as_soon_as_its_group_stops_has_not_failed():
    """It may be gone before its leader, which announced the end to the group, has done anything else."""
    pipe, theirs = pipes()
    reports = Reports()
    theirs.send(Ready(KINDS_DIGEST, HELLO))
    remote = StartingRank(1, pipe, NoProcess()).wait_ready(reports)

    class Runner:
        def stop_ranks(self) -> None:
            theirs.close()
            remote._thread.join(30.0)

    runner: Any = Runner()
    Ranks(runner, [], [], [remote], RankWatch([remote], Arrivals())).close()
    assert not remote._thread.is_alive() and not reports.failures and not remote.failure


@pytest.mark.parametrize("what", ["the warm-up", "reading adapter x"])
def test_a_rank_that_hangs_before_the_worker_serves_ends_the_start(what, monkeypatch):
    """The watch of a worker that serves does not run yet, and a collective operation has no time-out."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    rank = FakeRank(silent=START_SECONDS - 1)

    def operate(*_: object) -> None:
        time.sleep(0.2)
        assert not rank.killed, "it may still come"
        rank.silent = START_SECONDS
        wait_for(lambda: rank.killed, 30.0, "the silent rank is killed")
        raise InternalError("a rank of the group was lost")

    remote: Any = [rank]
    config = WorkerConfig(
        role="decode",
        engine=EngineConfig(model=Path("/fake"), lora=("x=/x",)),
        redis_url="redis://none",
        secret="s" * 16,
    )
    loaded: Any = LoadedEngine.__new__(LoadedEngine)
    runner: Any = SimpleNamespace(warm_up=operate)
    loaded.engine = SimpleNamespace(adapters=SimpleNamespace(load=operate))
    loaded.ranks = Ranks(runner, [], [], remote, RankWatch(remote, Arrivals()))
    health: Any = SimpleNamespace(describe=say)
    starts = {
        "the warm-up": lambda: loaded.ranks.warm_up(say),
        "reading adapter x": lambda: loaded._load_adapters(config.engine, health),
    }
    with pytest.raises(SetupError, match=f"{what} failed: a rank of the group was lost"):
        starts[what]()


@pytest.mark.parametrize(
    ("silent", "between_steps", "told"), [(0.0, True, True), (0.0, False, False), (9.0, True, False)]
)
def test_the_group_is_stopped_between_steps_and_only_if_no_rank_is_silent(
    silent, between_steps, told, monkeypatch
):
    """A collective operation that one rank does not enter never ends."""
    monkeypatch.setattr(ranks, "STOP_SECONDS", 0.05)
    asked, over = threading.Event(), threading.Event()

    class Runner:
        def stop_ranks(self) -> None:
            asked.set()
            over.wait()  # as if a rank had hung at this moment

    rank, runner = FakeRank(silent=silent), Runner()
    remote: Any = [rank]
    group: Any = runner
    closing = threading.Thread(
        target=Ranks(group, [], [], remote, RankWatch(remote, Arrivals())).close,
        kwargs={"between_steps": between_steps},
        daemon=True,
    )
    closing.start()
    closing.join(20.0)
    ended = not closing.is_alive()
    over.set()
    assert ended and asked.is_set() == told
    killed = ["kill"] if silent else []
    assert rank.did == ["expect_end", *killed, "start_closing", "end"]


def test_a_message_that_a_closed_pipe_does_not_take_is_no_write_that_hangs():
    pipe, theirs = pipes()
    outbox = RankOutbox(pipe, "outbox")
    outbox.start()
    theirs.close()
    pipe.close()
    outbox.put(BIG)
    outbox._thread.join(30.0)
    assert not outbox._thread.is_alive() and outbox.stuck_seconds() == 0.0


def test_a_rank_of_another_version_is_refused_at_its_start():
    """Their kinds of messages may have other numbers: one would be decoded as another."""
    pipe, theirs = pipes()
    theirs.send(Ready(bytes(16), HELLO))
    with pytest.raises(SetupError, match="rank 1 runs another version"):
        StartingRank(1, pipe, NoProcess()).wait_ready(Reports())
    theirs.close()


def test_half_a_message_of_a_rank_that_froze_ends_the_start():
    ours, theirs = Pipe()
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"half")
    began = time.monotonic()
    with pytest.raises(SetupError, match="rank 1 did not start"):
        StartingRank(1, RankPipe(ours), NoProcess()).wait_ready(Reports(), began + 0.2)
    theirs.close()


def test_ranks_share_the_deadline_of_the_start():
    """One after the other they could take it once each."""
    pairs = [pipes() for _ in range(3)]
    passed = time.monotonic() - 1.0
    for rank, (pipe, _) in enumerate(pairs, 1):
        with pytest.raises(SetupError, match=f"rank {rank} did not start"):
            StartingRank(rank, pipe, NoProcess()).wait_ready(Reports(), passed)
    for _, theirs in pairs:
        theirs.close()


def test_a_rank_that_its_leader_kills_has_not_failed():
    pipe, theirs = pipes()
    process = NoProcess()
    reports = Reports()
    theirs.send(Ready(KINDS_DIGEST, HELLO))
    remote = StartingRank(1, pipe, process).wait_ready(reports)
    remote.kill()
    theirs.close()
    remote._thread.join(30.0)
    assert process.killed and not remote._thread.is_alive() and not reports.failures


def test_a_new_operation_is_never_read_with_the_time_of_the_previous_one():
    """It would look as if the leader had waited since then."""
    counted: list[int] = []

    def clock() -> float:
        counted.append(arrivals.count if counted else 0)
        return float(len(counted))

    arrivals = Arrivals(clock)
    arrivals.arrive()
    arrivals.arrive()
    assert counted == [0, 0, 1] and (arrivals.count, arrivals.at) == (2, 3.0)


def test_a_killed_rank_has_failed_once():
    with spawned() as (remote, _, reports):
        os.kill(pid_of(remote), signal.SIGKILL)
        wait_for(lambda: reports.failures, 30.0, "it is noticed")
        assert reports.said == ["rank 1 has died"] and remote.silent_seconds(Arrivals()) == math.inf
        for _ in range(MANY):
            remote.handle(BIG)  # into the void, not into an exception
        assert len(reports.failures) == 1


def test_a_rank_that_can_handle_no_more_messages_has_failed():
    """It would beat on."""
    with spawned() as (remote, _, reports):
        remote.handle(BREAK)
        wait_for(lambda: reports.failures, 30.0, "it is noticed")
        assert reports.said == ["rank 1 has died"]


def test_a_message_that_the_leader_cannot_handle_ends_the_rank():
    """Its later messages would not be read."""
    with spawned() as (remote, _, reports):

        def refuse(event: Any) -> None:
            raise KeyError("not what was expected")

        remote.start(refuse)
        remote.handle(small(1))
        wait_for(lambda: reports.failures, 30.0, "it is noticed")
        assert reports.said == ["a message of rank 1 could not be handled: Confirmed"]


def test_a_rank_that_was_asked_to_close_has_not_failed():
    with spawned() as (remote, _, reports):
        remote.start_closing()
        remote.end(30.0)
        assert not reports.failures and not remote.failure
        with pytest.raises(ProcessLookupError):
            os.kill(pid_of(remote), 0)
