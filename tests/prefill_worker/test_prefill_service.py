"""The Prefill service over gRPC: checks of wire version and epoch, and attempts that end with their first token."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.config.router import RouterConfig
from cluster.errors import AdapterMissingError, DrainingError, StaleEpochError, WireVersionError
from cluster.protocol.block_hash import pack_tokens
from cluster.protocol.pooling import Embedding, Pooling
from cluster.protocol.wire_version import WIRE_VERSION
from cluster.rpc import errors
from engine.request import EngineRequest, FinishReason
from prefill_worker import role as role_module
from prefill_worker.worker import PrefillService
from router.frontends.http.openai.requests import CompletionRequest, read_request
from router.request.validator import Envelope, Validator
from tests.harness.waiting import until as until_true
from tests.prefill_worker.late_reads import DECODE, World
from wire import common_pb2, handoff_pb2, prefill_pb2, prefill_pb2_grpc
from worker.identity import WorkerIdentity
from worker.server import TypedErrors

until = partial(until_true, seconds=15.0)

EPOCH = 0x5EED
T = b"t" * 16
HANDLE = 100


@asynccontextmanager
async def serving():
    """A World behind its service, with the real worker's check of epochs."""
    world = World()
    me: Any = SimpleNamespace(worker_id="p", epoch=EPOCH)
    world.role._parts.identity.check_epoch = lambda epoch: WorkerIdentity.check_epoch(me, epoch)
    server = grpc.aio.server(interceptors=[TypedErrors()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillService(world.role, "p"), server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield world, prefill_pb2_grpc.PrefillStub(channel)
    finally:
        await world.close()
        await server.stop(None)


def run(new: int = 4, said: int = 0, n: int = 1, **more: object) -> prefill_pb2.PrefillRunRequest:
    """`said`: tokens that earlier attempts have sent."""
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    fields: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "transfer_id": T,
        "request_id": "r",
        "worker_epoch": EPOCH,
        "decode": DECODE,
        "handle": common_pb2.HandleRef(incarnation=1, number=HANDLE),
        "spec": common_pb2.GenerateSpec(
            model_id="m",
            prompt_tokens=pack_tokens([11] * 16),
            output_tokens=pack_tokens([12] * said),
            sampling=sampling,
            n=n,
            salt=bytes(16),
        ),
    }
    return prefill_pb2.PrefillRunRequest(**{**fields, **more})


async def refusal(call) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 15)
    return errors.error_from_rpc(caught.value)


@pytest.mark.parametrize("version", [0, WIRE_VERSION - 1, WIRE_VERSION + 1])
async def test_a_run_of_another_wire_version_is_refused(version):
    async with serving() as (world, stub):
        error = await refusal(stub.Run(run(wire_version=version)))
        assert isinstance(error, WireVersionError)
        assert str(version) in error.message and str(WIRE_VERSION) in error.message
        assert error.field == "wire_version"
        assert not len(world.role.attempts) and not world.role.attempts.is_ended(T)


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
async def test_a_run_for_an_earlier_life_is_refused(epoch):
    async with serving() as (world, stub):
        error = await refusal(stub.Run(run(worker_epoch=epoch)))
        assert isinstance(error, StaleEpochError)
        assert error.field == "worker_epoch"
        assert not len(world.role.attempts)


@pytest.mark.parametrize(("new", "said", "n"), [(1, 0, 1), (1, 0, 3), (5, 4, 1)])
async def test_an_attempt_that_ends_with_its_first_token_ships_nothing(new, said, n):
    async with serving() as (world, stub):
        await stub.Run(run(new=new, said=said, n=n))
        await until(lambda: world.engine.has_work, "the engine has it")
        await world.steps()
        await until(lambda: bool(world.router.ends), "its end came")
        tokens, end = world.router.tokens[HANDLE], world.router.ends[HANDLE]
        assert sorted(token.choice for token in tokens) == list(range(n))
        assert all(token.finish == common_pb2.FINISH_REASON_LENGTH for token in tokens)
        assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE
        assert (end.report.kv_bytes_shipped, end.report.transport) == (0, "")
        assert end.report.computed_prompt_tokens == 16
        assert world.sender.live == 0 and not world.link.said and not world.rank._transfers
        await until(lambda: world.engine.stats().blocks_held == 0, "blocks given back")
        assert next(iter(world.engine.held_chains())).held == (16 + said) // 4, (
            "the prompt stays as prefix cache"
        )


def prompt_only(kind: str) -> common_pb2.SamplingParams:
    """As a router sends it, whose first token is the attempt's last."""
    text: Any = SimpleNamespace(
        vocab_size=100, max_position_embeddings=64, generation={}, most_bytes=None, has_head=True
    )
    validator = Validator(RouterConfig(model="m", secret="x" * 16), text)
    if kind == "embedding":
        how = Embedding(Pooling.MEAN, 8, normalised=True)
        made = validator.embedding([11] * 16, how, Envelope())
    else:
        asked = {
            "prompt": "a",
            "max_tokens": 0,
            "echo": True,
            **({"logprobs": 1} if kind == "scores" else {}),
        }
        made = validator.completion(
            [11] * 16, read_request(CompletionRequest, asked, validator.limits), Envelope()
        )
    assert made.prompt_only
    return made.sampling


@pytest.mark.parametrize("kind", ["prompt", "scores", "embedding"])
async def test_work_on_the_prompt_alone_reserves_at_no_decode_worker(kind):
    """Although it names one."""
    async with serving() as (world, stub):
        request = run()
        request.spec.sampling.CopyFrom(prompt_only(kind))
        await stub.Run(request)
        await until(lambda: world.engine.has_work, "the engine has it, which a reservation precedes")
        assert world.sender.live == 0 and not world.link.said


async def test_an_attempt_that_may_go_on_is_handed_over():
    async with serving() as (world, stub):
        await stub.Run(run(new=5, said=3))
        await until(lambda: world.engine.has_work, "the engine has it")
        await world.steps()
        await until(lambda: bool(world.link.of("slot_request")), "slots are asked for")
        assert world.sender.live == 1


async def test_a_worker_that_has_failed_is_not_refused_by_the_decode_worker():
    """The router would leave out the decode worker, and come back here."""
    async with serving() as (world, stub):
        await stub.Run(run())
        await until(lambda: world.engine.has_work, "the engine has it")
        world.role.failed(DrainingError("p has failed and ends"))
        await until(lambda: bool(world.router.ends), "its end came")
        (end,) = world.router.ends.values()
        assert (end.outcome, end.error.code) == (common_pb2.ATTEMPT_OUTCOME_ABORTED, "DrainingError")


@pytest.mark.parametrize("ends", [{1}, {0, 1}], ids=["one", "all"])
async def test_a_running_choice_is_handed_over_although_another_has_ended(ends):
    async with serving() as (world, stub):
        await stub.Run(run(n=2))
        await until(lambda: world.engine.has_work, "the engine has it")
        output = world.engine.step()
        for index, token in enumerate(output.tokens):
            if token.choice in ends:
                output.tokens[index] = replace(token, finish=FinishReason.STOP)
        world.role.on_output(output)
        said = "abort" if len(ends) == 2 else "finish"
        await until(lambda: bool(world.link.of(said)), f"{said} is said")
        assert not world.link.of("finish" if len(ends) == 2 else "abort")


async def test_a_cancel_of_a_queued_request_is_answered_at_once(monkeypatch):
    """It holds no blocks that could be waited for."""
    monkeypatch.setattr(role_module, "FREE_SECONDS", 60.0)
    async with serving() as (world, stub):
        for number in range(8):  # two steps' worth
            await stub.Run(run(transfer_id=bytes([number]) * 16, handle=world.router.handle()))
        await until(lambda: len(world.role.attempts) == 8, "they have come")
        await stub.Run(run(handle=world.router.handle()))
        await until(lambda: world.role.prefilling.admission.waiting == 1, "it queues")
        attempt = world.role.attempts.get(T)
        async with asyncio.timeout(10):
            answer = await stub.Cancel(prefill_pb2.PrefillCancelRequest(transfer_id=T))
        assert answer.known and attempt.log.ended


async def test_a_cancel_reports_free_blocks_once_they_are_free():
    async with serving() as (world, stub):
        await stub.Run(run())
        await until(lambda: world.engine.has_work, "the engine has it")
        await world.steps()
        attempt = world.role.attempts.get(T)
        await world.grant_all(attempt, 4)
        cancelling = asyncio.ensure_future(stub.Cancel(prefill_pb2.PrefillCancelRequest(transfer_id=T)))
        await until(lambda: attempt.log.ended, "it has ended")
        await asyncio.sleep(0.05)
        assert not cancelling.done(), "its blocks are still read"
        for write in world.endpoint.writes:
            write.state = "done"
        answer = await cancelling
        assert answer.known
        assert world.engine.stats().blocks_held == 0


@pytest.mark.parametrize(("loaded", "outcome"), [(False, "ABORTED"), (True, "REFUSED")])
async def test_a_missing_adapter_is_reported_for_the_worker_that_lacks_it(loaded, outcome, monkeypatch):
    """ABORTED: this one; REFUSED: the decode worker."""
    digest = "0123456789abcdef" * 2

    async def reserve(*_: object) -> None:
        raise AdapterMissingError("at the decode worker")

    async with serving() as (world, stub):
        monkeypatch.setattr(world.role.prefilling._sender, "reserve", reserve)
        if loaded:
            world.engine.adapters.slots[digest] = 1
        request = run()
        request.spec.adapter = digest
        await stub.Run(request)
        await until(lambda: bool(world.router.ends), "its end came")
        end = world.router.ends[HANDLE]
        assert common_pb2.AttemptOutcome.Name(end.outcome) == f"ATTEMPT_OUTCOME_{outcome}"
        assert end.error.code == "AdapterMissingError"
        assert world.engine.stats().blocks_held == 0


async def test_a_decode_worker_is_not_asked_for_the_prompts_log_probabilities(monkeypatch):
    asked: list[handoff_pb2.Reserve] = []

    async def reserve(_: object, wanted: handoff_pb2.Reserve, __: float) -> None:
        asked.append(wanted)
        raise AdapterMissingError("enough is seen")

    async with serving() as (world, stub):
        monkeypatch.setattr(world.role.prefilling._sender, "reserve", reserve)
        request = run()
        request.spec.sampling.prompt_logprobs, request.spec.sampling.prompt_top_logprobs = True, 3
        await stub.Run(request)
        await until(lambda: bool(world.router.ends), "its end came")
    request.spec.sampling.ClearField("prompt_logprobs")
    request.spec.sampling.ClearField("prompt_top_logprobs")
    assert [one.spec for one in asked] == [request.spec]


async def test_the_engine_computes_with_the_priority_that_admission_gave(monkeypatch):
    async with serving() as (world, stub):
        enter, add, priorities = world.role.prefilling.admission.enter, world.engine.add, []

        async def aged(*arguments, **named):
            return 1, (await enter(*arguments, **named))[1]

        monkeypatch.setattr(world.role.prefilling.admission, "enter", aged)

        def counted(one: EngineRequest) -> None:
            priorities.append(one.priority)
            add(one)

        monkeypatch.setattr(world.engine, "add", counted)
        await stub.Run(run(new=1))
        await until(lambda: world.engine.has_work, "the engine has it")
        await world.steps()
        await until(lambda: bool(world.router.ends), "its end came")
        assert priorities == [1]
