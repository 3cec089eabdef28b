"""An exception of a rank in its part of a step counts as the engine's failure, as if the leader had raised it; the loss of
another rank does not."""

from __future__ import annotations

import asyncio
import dataclasses
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import InternalError
from cluster.protocol.block_hash import pack_tokens
from decode_worker.worker import make_role
from engine.parallel.group import Arrivals, _Together
from kv_transfer.messages import PeerRank
from tests.harness.checkpoints import prompt_ids
from tests.harness.link_client import LinkClient
from tests.harness.waiting import wait_for
from tests.worker.echo_rank import Echo
from tests.worker.fake_rank import Reports
from tests.worker.local_runs import LONG, run_local
from wire import common_pb2
from worker.ranks import local
from worker.ranks import rank_main as rank_mains
from worker.ranks.process import spawn_rank
from worker.worker import Worker

NO_TOKEN = 1 << 30  # no vocabulary has it: every rank raises when it looks for its row


@pytest.fixture
async def worker(checkpoint):
    engine = EngineConfig(
        model=checkpoint("llama"), dtype="float32", kv_memory_bytes=8 << 20, tensor_parallel=2, threads=1
    )
    transfer = TransferConfig(
        transport="grpc", ring_bytes=1 << 20, ring_max_bytes=4 << 20, slot_bytes=1 << 16
    )
    made = Worker(WorkerConfig(role="decode", engine=engine, transfer=transfer), make_role)
    await made.start()
    yield made
    async with asyncio.timeout(LONG):
        await made.stop()


async def test_a_request_that_raises_in_every_rank_is_reported_as_the_cause(worker):
    runner = worker._engine.ranks.runner
    execute = runner.execute

    def poisoned(plan):
        items = [
            msgspec.structs.replace(item, token_ids=[NO_TOKEN] * len(item.token_ids)) for item in plan.items
        ]
        return execute(dataclasses.replace(plan, items=items))

    runner.execute = poisoned
    client = LinkClient()
    async with grpc.aio.insecure_channel(worker.address) as channel:
        spec = common_pb2.GenerateSpec(
            model_id=worker._identity.model_id,
            prompt_tokens=pack_tokens(prompt_ids(20)),
            sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            n=1,
            salt=bytes(16),
        )
        ending = asyncio.ensure_future(run_local(client, worker, channel, 9, spec))
        await asyncio.wait_for(worker.wait_failed(), LONG)
        assert (await ending).error.code == "EngineFailedError"
    await client.close()


class Runner:
    """The runner of a rank whose group breaks in its first step."""

    arrivals = Arrivals()

    def serve(self) -> None:
        raise InternalError("a rank of the group was lost")


class Endpoint(Echo):
    hello = PeerRank(1, "agent", b"")


def rank_main(rank: int, connection: Connection) -> None:
    parts: Any = local
    parts.load = lambda *_, **__: None
    parts.open_rank = lambda *_: (Runner(), Endpoint(), [])
    settings: Any = SimpleNamespace(worker_id="w")
    rank_mains.rank_main(rank, connection, settings, 1, "")


def test_a_rank_that_ends_because_another_was_lost_reports_no_exception():
    reports = Reports()
    remote = spawn_rank(1, rank_main).wait_ready(reports)
    try:
        wait_for(lambda: reports.failures, 30.0, "its end is noticed")
    finally:
        remote.kill()
    assert [(type(one), str(one)) for one in reports.failures] == [(InternalError, "rank 1 has died")]


def test_a_failed_collective_operation_raises_an_internal_error():
    together = _Together(Arrivals())
    with (
        pytest.raises(InternalError, match="a rank of the group was lost: Connection closed by peer"),
        together,
    ):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(ValueError), together:
        raise ValueError("not an operation of the group")
