"""A worker whose engine fails reports that for every attempt before it exits: requests of the failed step get
EngineFailedError, all others DrainingError. Real workers, real gRPC, real links."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.config.worker import EngineConfig, TransferConfig, WorkerConfig
from cluster.errors import EngineFailedError, EngineRequestError, InternalError, from_wire
from cluster.protocol.block_hash import pack_tokens
from cluster.protocol.wire_version import WIRE_VERSION
from decode_worker import worker as decode_worker
from prefill_worker import worker as prefill_worker
from tests.harness.checkpoints import prompt_ids
from tests.harness.link_client import LinkClient, Reading
from tests.harness.waiting import until
from tests.worker.fake_rank import FakeRank
from tests.worker.local_runs import LONG, read, run_local
from wire import common_pb2, handoff_pb2, prefill_pb2, prefill_pb2_grpc
from worker.ranks.process import RankRaised
from worker.worker import Worker


class Pair:
    def __init__(self, model: Path):
        engine = EngineConfig(model=model, dtype="float32", kv_memory_bytes=8 << 20, max_batch_tokens=128)
        transfer = TransferConfig(
            transport="grpc", ring_bytes=1 << 20, ring_max_bytes=4 << 20, slot_bytes=1 << 16
        )
        self.decode = Worker(
            WorkerConfig(role="decode", engine=engine, transfer=transfer), decode_worker.make_role
        )
        self.prefill = Worker(
            WorkerConfig(role="prefill", engine=engine, transfer=transfer), prefill_worker.make_role
        )
        self.channels: list[grpc.aio.Channel] = []
        self.client = LinkClient()

    async def start(self) -> None:
        await self.decode.start()
        await self.prefill.start()
        self.channels = [grpc.aio.insecure_channel(one.address) for one in (self.decode, self.prefill)]

    async def stop(self) -> None:
        await self.client.close()
        for channel in self.channels:
            await channel.close(None)
        await self.prefill.stop()
        await self.decode.stop()

    def spec(self, length: int) -> common_pb2.GenerateSpec:
        return common_pb2.GenerateSpec(
            model_id=self.decode._identity.model_id,
            prompt_tokens=pack_tokens(prompt_ids(length)),
            sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True),
            n=1,
            salt=bytes(16),
        )

    def read(self, worker: Worker, number: int, spec: common_pb2.GenerateSpec) -> Reading:
        return read(self.client, worker, number, spec)

    async def run_local(self, number: int) -> common_pb2.AttemptEnd:
        return await run_local(self.client, self.decode, self.channels[0], number, self.spec(20 + number))

    async def expected(self, number: int) -> common_pb2.AttemptEnd:
        """An attempt that waits for its prefill worker."""
        spec = self.spec(20 + number)
        reading = self.read(self.decode, number, spec)
        reserve = handoff_pb2.Reserve(
            transfer_id=reading.transfer_id,
            spec=spec,
            token_count=len(spec.prompt_tokens) // 4,
            handle=reading.reference,
        )
        role: Any = self.decode._role
        role.attempts.open_new(reserve)
        return await reading.wait(LONG)

    async def run(self, number: int) -> common_pb2.AttemptEnd:
        spec = self.spec(40)
        reading, decoding = (self.read(worker, number, spec) for worker in (self.prefill, self.decode))
        stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(self.channels[1])
        await stub.Run(
            prefill_pb2.PrefillRunRequest(
                wire_version=WIRE_VERSION,
                transfer_id=reading.transfer_id,
                request_id=f"r{number}",
                worker_epoch=self.prefill.epoch,
                spec=spec,
                decode=self.decode._identity.ref,
                admission_deadline_ms=30_000,
                handle=reading.reference,
                decode_handle=decoding.reference,
            )
        )
        return await reading.wait(LONG)


@pytest.fixture
async def pair(checkpoint):
    made = Pair(checkpoint("llama"))
    await made.start()
    yield made
    async with asyncio.timeout(LONG):
        await made.stop()


def breaks(worker: Any, error: BaseException) -> None:
    def step() -> Any:
        raise error

    worker._engine.engine.step = step


async def test_requests_of_a_failed_decode_step_are_named_and_waiting_ones_go_back(pair):
    ends = [asyncio.ensure_future(end) for end in (pair.run_local(1), pair.expected(2))]
    await until(
        lambda: len(pair.decode._role.attempts) == 2 and len(pair.decode._role.attempts.by_engine_id) == 1,
        "runs",
    )
    breaks(pair.decode, IndexError("an index"))
    await pair.decode.wait_failed()
    stopping = asyncio.create_task(pair.decode.stop())
    first, second = await asyncio.gather(*ends)
    assert first.error.code == "EngineFailedError"
    assert "IndexError" in first.error.message
    assert second.error.code == "DrainingError"
    assert {first.outcome, second.outcome} == {common_pb2.ATTEMPT_OUTCOME_ABORTED}
    await asyncio.wait_for(stopping, LONG)


async def test_a_request_that_the_failed_step_did_not_compute_goes_back(pair):
    """It is in the engine as well, but it is no cause: after two such failures it would be given up."""
    ends = [asyncio.ensure_future(pair.run_local(number)) for number in (5, 6)]
    engine = pair.decode._engine.engine
    await until(lambda: len(engine.step_items) == 2, "both run")

    def step() -> Any:
        engine.step_items = engine.step_items[:1]
        raise IndexError("an index")

    engine.step = step
    await asyncio.wait_for(pair.decode.wait_failed(), LONG)
    guilty = engine.step_items[0].request_id
    codes = {
        bytes([number]).hex() * 16: (await end).error.code for number, end in zip((5, 6), ends, strict=True)
    }
    assert codes.pop(guilty) == "EngineFailedError"
    assert list(codes.values()) == ["DrainingError"]


async def test_the_cause_counts_that_is_reported_after_another_rank_s_exit(pair):
    """With three ranks, the exit of one that the exception of another one took along may be seen first."""
    ending = asyncio.ensure_future(pair.run_local(7))
    await until(lambda: len(pair.decode._role.attempts.by_engine_id) == 1, "runs")
    causes = pair.decode._ending
    causes._further_ranks = 2
    causes.rank_failed(InternalError("rank 1 has died"))
    causes.rank_failed(RankRaised("IndexError"))
    await asyncio.wait_for(pair.decode.wait_failed(), LONG)
    assert (await ending).error.code == "EngineFailedError"


async def test_the_cause_counts_that_is_reported_after_the_watch_saw_the_exit(pair):
    ending = asyncio.ensure_future(pair.run_local(8))
    loaded, causes = pair.decode._engine, pair.decode._ending
    await until(lambda: len(loaded.engine.step_items) == 1, "runs")
    step = loaded.engine.step

    def slow() -> Any:
        time.sleep(0.05)
        return step()

    loaded.engine.step = slow  # the request must not end before the watch looks
    causes._further_ranks = 1
    loaded.ranks.remote.append(FakeRank(1, failure="rank 1 has died"))
    await until(loaded._watching.done, "the watch has seen it")
    causes.rank_failed(RankRaised("IndexError"))
    await asyncio.wait_for(pair.decode.wait_failed(), LONG)
    assert (await ending).error.code == "EngineFailedError"
    loaded.ranks.remote.clear()


async def test_a_cancelled_attempt_keeps_no_other_from_its_end(pair):
    """The future of its prefill is cancelled with it, and raises when it is asked for its exception."""
    role = pair.prefill._role
    attempts = [
        SimpleNamespace(prefilled=asyncio.get_running_loop().create_future(), engine_id=n, task=None)
        for n in "ab"
    ]
    attempts[0].prefilled.cancel()
    real, role.attempts = role.attempts, SimpleNamespace(all=lambda: attempts)
    role.prefilling.by_engine_id = {"a": attempts[0], "b": attempts[1]}
    try:
        role.failed(InternalError("rank 1 has died"))
    finally:
        role.attempts, role.prefilling.by_engine_id = real, {}
    assert isinstance(attempts[1].prefilled.exception(), InternalError)


async def test_requests_of_a_failed_prefill_step_are_named(pair):
    breaks(pair.prefill, IndexError("an index"))
    ending = asyncio.ensure_future(pair.run(3))
    await asyncio.wait_for(pair.prefill.wait_failed(), LONG)
    stopping = asyncio.create_task(pair.prefill.stop())
    said = await ending
    assert (said.outcome, said.error.code) == (common_pb2.ATTEMPT_OUTCOME_ABORTED, "EngineFailedError")
    await asyncio.wait_for(stopping, LONG)


@pytest.mark.parametrize("how", ["named", "rank"])
async def test_no_request_is_the_cause_where_the_failure_has_another(pair, how):
    """A rank's death also breaks the leader's step."""
    ending = asyncio.ensure_future(pair.run_local(4))
    await until(lambda: len(pair.decode._role.attempts.by_engine_id) == 1, "runs")
    loaded, causes = pair.decode._engine, pair.decode._ending
    if how == "named":
        breaks(pair.decode, InternalError("rank 1 did not finish its part"))
    else:
        causes._further_ranks = 1  # the step breaks first, the pipe of the rank ends a moment later
        breaks(pair.decode, RuntimeError("connection closed by peer"))
        await until(lambda: not loaded.host.healthy(), "the step has failed")
        causes.rank_failed(InternalError("rank 1 has died"))
    await asyncio.wait_for(pair.decode.wait_failed(), LONG)
    assert (await ending).error.code == "DrainingError"


async def test_an_engine_that_refuses_a_request_keeps_running(pair):
    def add(request: Any) -> None:
        raise KeyError("a fault of ours")

    engine = pair.decode._engine.engine
    whole, engine.add = engine.add, add
    said = await pair.run_local(5)
    assert said.error.code == "EngineRequestError"
    engine.add = whole
    assert (await pair.run_local(6)).outcome == common_pb2.ATTEMPT_OUTCOME_DONE
    other = pair.prefill._engine.engine
    other.add = add
    said = await pair.run(7)
    assert (said.outcome, said.error.code) == (common_pb2.ATTEMPT_OUTCOME_ABORTED, "EngineRequestError")
    assert pair.prefill.healthy() and pair.decode.healthy()


def test_the_class_survives_the_wire():
    assert type(from_wire(EngineFailedError("x").to_wire())) is EngineFailedError
    assert type(from_wire(EngineRequestError("x").to_wire())) is EngineRequestError
