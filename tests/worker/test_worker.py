"""A worker with silent ranks, or that has failed: the beats it sends, what it ends first, what it registers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import InternalError
from cluster.kubernetes.pod import Pod
from cluster.protocol.times import LOST_SECONDS, RANK_QUIET_SECONDS
from decode_worker.worker import make_role
from tests.conftest import Checkpoint
from tests.worker.fake_rank import FakeRank
from worker import identity, membership
from worker import worker as worker_module
from worker.worker import Worker

LONG = 60.0


@pytest.fixture
def config(checkpoint: Checkpoint) -> WorkerConfig:
    engine = EngineConfig(model=checkpoint("llama"), dtype="float32", kv_memory_bytes=8 << 20)
    transfer = TransferConfig(
        transport="grpc", ring_bytes=1 << 20, ring_max_bytes=4 << 20, slot_bytes=1 << 16
    )
    return WorkerConfig(role="decode", engine=engine, transfer=transfer)


@pytest.fixture
async def worker(config: WorkerConfig) -> AsyncIterator[tuple[Worker, FakeRank]]:
    """It, and a further rank of it."""
    worker, rank = Worker(config, make_role), FakeRank()
    remote: list[Any] = worker._engine.ranks.remote
    remote.append(rank)
    await worker.start()
    yield worker, rank
    remote.clear()
    async with asyncio.timeout(LONG):
        await worker.stop()


async def test_the_model_id_is_that_of_the_context_that_is_served(config, monkeypatch):
    """The factors of a longrope model follow from it."""
    seen = {}

    def make_model_id(*_: object, **options: object) -> str:
        seen.update(options)
        raise InternalError("no model is loaded here")

    monkeypatch.setattr(worker_module, "make_model_id", make_model_id)
    engine = config.engine.model_copy(update={"max_model_len": 64})
    with pytest.raises(InternalError):
        Worker(config.model_copy(update={"engine": engine}), make_role)
    assert seen["max_model_len"] == 64


async def test_beats_stop_while_a_rank_is_silent_or_the_engine_hangs(worker, monkeypatch):
    one, rank = worker
    engine = one._engine
    assert engine.beat_step() == engine.host.steps
    rank.silent = RANK_QUIET_SECONDS
    assert engine.beat_step() is None and engine.host.healthy()
    rank.silent = 0.0
    assert engine.beat_step() == engine.host.steps
    monkeypatch.setattr(engine.host, "healthy", lambda: False)
    assert engine.beat_step() is None


class Registered:
    """In place of Registration: what the worker passes to it."""

    slot = 1

    def __init__(self, redis_url: str, namespace: str, info: Any, *, healthy: Any, **_: Any):
        self.info, self.healthy = info, healthy

    def start(self) -> None:
        pass

    stop = start


class Reporter:
    def __init__(self, *_: Any, index_url: str) -> None:
        pass

    def start(self) -> None:
        pass

    stop = start


@pytest.fixture
def registered(worker, monkeypatch):
    """Registers the worker, which spans `nodes`."""
    one = worker[0]
    monkeypatch.setattr(membership, "Registration", Registered)
    monkeypatch.setattr(membership, "ChainReporter", Reporter)
    monkeypatch.setattr(identity, "own_pod", lambda: Pod("ns", "p", "u", "c", "n", 1.0))

    def register(nodes: int) -> Any:
        engine = one._config.engine.model_copy(update={"nodes": nodes})
        config = one._config.model_copy(update={"engine": engine, "redis_url": "redis://nowhere"})
        one._identity.config = one._membership.config = config
        one._membership.start()
        made = one._membership._registration
        one._membership._registration = one._membership._reporter = None
        return made

    return register


async def test_the_lease_is_not_renewed_while_a_rank_is_silent(worker, registered):
    healthy, rank = registered(1).healthy, worker[1]
    assert healthy()
    rank.silent = RANK_QUIET_SECONDS
    assert not healthy()
    rank.silent = 0.0
    assert healthy()


async def test_a_worker_that_spans_nodes_names_no_pod(registered):
    """The end of its leader's container proves nothing of ranks on other nodes, which may write on."""
    assert registered(1).info.pod.uid == "u"
    assert registered(2).info.pod == Pod()


async def test_the_first_registration_has_the_adapters_that_were_loaded_before_it(worker, registered):
    assert registered(1).info.adapters == ()
    assert worker[0]._membership.set_adapters((("later", "d"),))
    assert registered(1).info.adapters == (("later", "d"),)


async def test_health_can_be_watched(worker):
    async with grpc.aio.insecure_channel(worker[0].address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        async with asyncio.timeout(LONG):
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
            await worker[0]._server.set_serving(False)
            assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING


async def ended(watching: Any) -> None:
    while await watching.read():
        pass


async def test_a_worker_that_has_failed_cuts_streams_off_before_it_closes_anything(worker, monkeypatch):
    one, _ = worker
    go_on = asyncio.Event()
    monkeypatch.setattr(one._shutdown, "_try_to_drain", go_on.wait)
    async with grpc.aio.insecure_channel(one.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        async with asyncio.timeout(LONG):
            await watching.read()
        one._ending.fail(InternalError("a test"))
        stopping = asyncio.create_task(one.stop())
        try:
            with pytest.raises(grpc.aio.AioRpcError):
                await asyncio.wait_for(ended(watching), LONG)
        finally:
            go_on.set()
            await asyncio.wait_for(stopping, LONG)


async def test_ranks_that_are_silent_are_killed_before_anything_waits_for_them(worker, monkeypatch):
    one, rank = worker
    alive_at_close: list[bool] = []
    close = one._role.receiver.close

    async def closes() -> None:
        alive_at_close.append(not rank.killed)
        await close()

    monkeypatch.setattr(one._role.receiver, "close", closes)
    quiet = FakeRank()
    quiet.silent = LOST_SECONDS - 0.1
    remote: list[Any] = one._engine.ranks.remote
    remote.append(quiet)
    await one._engine.end_silent_ranks()
    assert not rank.killed and not quiet.killed
    rank.silent = LOST_SECONDS
    quiet.silent = 0.0
    await asyncio.wait_for(one.stop(), LONG)
    assert alive_at_close == [False]


async def test_a_worker_that_has_failed_is_not_healthy_though_its_engine_moves(worker):
    one, _ = worker
    assert one.healthy()
    one._ending.fail(InternalError("a test"))
    assert one._engine.host.healthy() and not one.healthy()


async def test_a_cancelled_wait_for_the_end_is_no_failure_and_no_drain(worker):
    """A supervisor stops to wait before it stops the worker, whose streams must not be cut off then."""
    one, _ = worker
    waits = [asyncio.create_task(one.wait_failed()), asyncio.create_task(one.wait_drain_wanted())]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    assert not one._ending.has_failed and one.healthy()
    one._ending.ask_drain("stay")
    assert await asyncio.wait_for(one.wait_drain_wanted(), LONG) == "stay"
