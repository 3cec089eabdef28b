"""A real worker with a rank that falls silent: what it stops sending, and what it kills before it waits for its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.config import EngineConfig, TransferConfig, WorkerConfig
from decode_worker.worker import DecodeWorker
from engine.parallel.group import Arrivals
from tests.worker.test_rank_watch import Rank
from worker.rank_watch import LOST_SECONDS, QUIET_SECONDS, RankWatch


@pytest.fixture
async def worker(checkpoint) -> AsyncIterator[tuple[DecodeWorker, Rank]]:
    engine = EngineConfig(model=checkpoint("llama"), dtype="float32", kv_memory_bytes=8 << 20)
    transfer = TransferConfig(transport="grpc", ring_bytes=1 << 20, slot_bytes=1 << 16)
    made, rank = DecodeWorker(WorkerConfig(role="decode", engine=engine, transfer=transfer)), Rank()
    made._core.ranks = replace(made._core.ranks, watch=RankWatch([rank], Arrivals()))
    await made.start()
    yield made, rank
    rank.silent = 0.0
    await made.stop()


async def test_beats_end_while_a_rank_is_silent(worker):
    made, rank = worker
    core = made._core
    assert core.beat_step() is not None
    rank.silent = QUIET_SECONDS + 0.1
    assert core.beat_step() is None
    rank.silent = 0.0
    assert core.beat_step() is not None


async def test_beats_end_while_the_engine_hangs(worker, monkeypatch):
    core = worker[0]._core
    monkeypatch.setattr(core.host, "healthy", lambda: False)
    assert core.beat_step() is None


async def test_silent_ranks_are_killed_before_the_engine_is_waited_for(worker):
    """The engine's thread may wait in a collective operation that the silent rank never enters."""
    made, rank = worker
    core, killed = made._core, []
    closed = made._attempts.close

    async def close() -> None:
        killed.append(rank.killed)
        await closed()

    made._attempts.close = close
    rank.silent = LOST_SECONDS + 1
    async with asyncio.timeout(60):
        await made.stop()
    assert killed == [True]
    assert core.failed.done() is False
