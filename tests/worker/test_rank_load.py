"""A rank that ends while all load, or gets a signal while it serves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import ConfigError, ModelError, SetupError
from engine import build
from engine.parallel.group import Arrivals, LostRankError
from tests.harness.waiting import wait_for
from tests.worker.echo_rank import HELLO, Echo
from tests.worker.fake_rank import Reports
from wire.handoff_pb2 import PartData
from worker.ranks import local, ranks
from worker.ranks import rank_main as rank_mains
from worker.ranks.pipe import KINDS_DIGEST, Failed, RankPipe, Ready
from worker.ranks.process import StartingRank, spawn_rank

LOST = f"{LostRankError.__name__}: a rank of the group was lost: Connection closed by peer"
MISSING = "ModelError: tensor x is missing"
UNJOINED = "SetupError: rank 1 of 3 did not join the others"
NO_PROCESS: Any = None


def starting(*firsts: object) -> list[StartingRank]:
    """Ranks from 1 on, with what each has sent first; None: nothing."""
    found = []
    for rank, first in enumerate(firsts, 1):
        ours, theirs = Pipe()
        other: Any = RankPipe(theirs)
        if first is not None:
            other.send(first)
        found.append(StartingRank(rank, RankPipe(ours), NO_PROCESS))
        KEPT.append(other)
    return found


KEPT: list[Any] = []  # the other ends of the pipes


@pytest.mark.parametrize(
    "error",
    [
        LostRankError("a rank of the group was lost"),
        SetupError("rank 0 of 3 did not join", field="tensor_parallel"),
    ],
)
@pytest.mark.parametrize(
    ("firsts", "said"),
    [
        ((Failed(LOST), Failed(MISSING)), f"rank 2 could not start: {MISSING}"),
        ((None, Failed(MISSING)), f"rank 2 could not start: {MISSING}"),
        ((Failed(UNJOINED), Failed(MISSING)), f"rank 2 could not start: {MISSING}"),
        ((Failed(UNJOINED), Failed(LOST)), f"rank 1 could not start: {UNJOINED}"),
        ((Failed(LOST), Ready(KINDS_DIGEST, HELLO)), ""),
        ((None, None), ""),
    ],
)
def test_the_start_fails_with_the_reason_of_the_rank_that_has_one(error, firsts, said, monkeypatch):
    """The others, and the leader, only know that one was lost."""
    monkeypatch.setattr(ranks, "REASON_SECONDS", 0.2)

    def load(*_: object) -> None:
        raise error

    monkeypatch.setattr(local, "load", load)
    config: Any = None
    with pytest.raises(SetupError) as caught:
        ranks._load_leader(config, "", None, print, starting(*firsts))
    assert caught.value.message == said if said else error.message in caught.value.message
    assert said or caught.value.field == error.field


@pytest.mark.parametrize("kind", [ConfigError, ModelError])
def test_an_error_that_the_leader_finds_itself_stays_its_own(kind, monkeypatch):
    """All ranks find most of them, each with its field at the leader only."""

    def load(*_: object) -> None:
        raise kind("no", field="x")

    monkeypatch.setattr(local, "load", load)
    config: Any = None
    with pytest.raises(kind, match="no") as caught:
        ranks._load_leader(config, "", None, print, starting(Failed(MISSING)))
    assert caught.value.field == "x"


def without_a_tensor(rank: int, connection: Connection, *arguments: Any) -> None:
    """A rank whose node has another checkpoint than the leader's."""

    def load_model(*_: object, **__: object) -> None:
        raise ModelError("tensor x is missing", field="x")

    parts: Any = build
    parts.load_model = load_model
    rank_mains.rank_main(rank, connection, *arguments)


def start(model: Path, said: Any) -> None:
    """A worker of two ranks, of which the second cannot load. In a process of its own, as the process group stays."""
    engine = EngineConfig(
        model=model,
        dtype="float32",
        memory_bytes=2 << 30,
        tensor_parallel=2,
        max_batch_tokens=64,
        max_batch_requests=4,
    )
    transfer = TransferConfig(transport="grpc", ring_bytes=1 << 20, slot_bytes=1 << 16)
    config = WorkerConfig(
        role="decode", engine=engine, transfer=transfer, redis_url="redis://none", secret="s" * 16
    )
    parts: Any = ranks
    parts.rank_main = without_a_tensor
    try:
        ranks.open_ranks(config, 1, Reports())
    except Exception as error:
        said.put((type(error), str(error)))


def test_a_rank_that_cannot_load_says_why_the_start_has_failed(checkpoint):
    """The leader notices its loss in an operation of the load."""
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    starting = context.Process(target=start, args=(checkpoint("llama"), said))
    starting.start()
    assert said.get(timeout=120) == (SetupError, f"rank 1 could not start: {MISSING}")
    starting.join(60)


class Runner:
    """The runner of a rank whose leader has nothing to compute."""

    arrivals = Arrivals()

    def serve(self) -> None:
        signal.pause()  # as a read does: a signal with a handler that raises ends it


def rank_main(rank: int, connection: Connection) -> None:
    parts: Any = local
    parts.load = lambda *_, **__: None
    parts.open_rank = lambda *_: (Runner(), Echo(), [])
    settings: Any = SimpleNamespace(worker_id="w")
    rank_mains.rank_main(rank, connection, settings, 1, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_of_a_worker_does_not_end_its_ranks_while_it_drains(number):
    """Ctrl-C at a terminal, or a service manager's stop."""
    reports, said = Reports(), list[Any]()
    remote = spawn_rank(1, rank_main).wait_ready(reports)
    remote.start(said.append)
    process: Any = remote._process
    try:
        os.kill(process._process.pid, number)
        remote.handle(PartData(payload=bytes(7)))
        wait_for(lambda: said or reports.failures, 30.0, "it answers, or has ended")
        remote.handle(PartData(payload=bytes(8)))
        wait_for(lambda: len(said) == 2 or reports.failures, 30.0, "it answers again")
        assert not reports.failures
    finally:
        remote.kill()


def leave_a_rank() -> None:
    """A leader whose start fails once its ranks are ready."""
    remote = spawn_rank(1, rank_main).wait_ready(Reports())
    process: Any = remote._process
    sys.stdout.write(f"{process._process.pid}\n")
    raise SystemExit(3)


def test_a_leader_that_leaves_without_ending_its_ranks_takes_them_along():
    """The interpreter waits for child processes, and ranks ignore the signal by which it ends them."""
    code = f"from {__name__} import leave_a_rank; leave_a_rank()"
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ended.returncode == 3
    wait_for(lambda: not psutil.pid_exists(int(ended.stdout)), 30.0, "the rank is gone")
