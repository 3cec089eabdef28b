"""A decode worker without a request's adapter refuses it by a typed error, and keeps nothing of it."""

from __future__ import annotations

import pytest

from cluster.errors import AdapterMissingError, from_wire
from cluster.protocol.block_hash import pack_tokens
from tests.decode_worker.decode_world import DecodeWorld
from tests.decode_worker.ready_handoff import PROMPT, SALT, TRANSFER, close
from tests.harness.waiting import until
from wire import common_pb2, decode_pb2, handoff_pb2

DIGEST, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


def spec() -> common_pb2.GenerateSpec:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return common_pb2.GenerateSpec(
        model_id="m", prompt_tokens=pack_tokens(PROMPT), sampling=sampling, n=1, salt=SALT, adapter=DIGEST
    )


@pytest.fixture
async def world():
    made = DecodeWorld()
    made.core.engine.adapters.slots[OTHER] = 1
    yield made
    assert made.core.engine.stats().blocks_held == 0
    await close(made)


async def test_a_hand_off_is_refused_and_taken_once_the_adapter_is_loaded(world):
    stream = world.connect("p", 1, 1)

    async def reserve(transfer_id: bytes) -> handoff_pb2.ReserveReply:
        asked = handoff_pb2.Reserve(
            transfer_id=transfer_id, spec=spec(), token_count=len(PROMPT), handle=world.router.handle()
        )
        stream.say(reserve=asked)

        def answers() -> list[handoff_pb2.ReserveReply]:
            given = [one.reserve_reply for one in stream.replies if one.HasField("reserve_reply")]
            return [one for one in given if one.transfer_id == transfer_id]

        await until(lambda: len(answers()) == 1, "an answer")
        return answers()[0]

    refused = await reserve(TRANSFER)
    error = from_wire(refused.refused)
    assert type(error) is AdapterMissingError and error.field == "adapter" and DIGEST in error.message
    assert world.receiver.live == 0 and world.core.engine.stats().blocks_held == 0
    assert await world.role.cancel_by_router(TRANSFER) and not len(world.role.attempts)
    world.core.engine.adapters.slots[DIGEST] = 2
    other = bytes([1]) * 16
    taken = await reserve(other)
    assert not taken.HasField("refused")
    assert world.receiver.live == 1 and DIGEST in world.role.adapters_held()
    ((sequence,),) = world.core.engine._scheduler.requests.values()
    assert sequence.request.adapter == DIGEST
    await world.role.abort(other)


@pytest.mark.parametrize("loaded", [False, True])
async def test_a_prompt_of_its_own_is_refused(world, loaded):
    """Local prefill: the end's reason names the adapter."""
    if loaded:
        world.core.engine.adapters.slots[DIGEST] = 2
    handle = world.router.handle()
    world.role.run(
        decode_pb2.DecodeRunRequest(
            transfer_id=TRANSFER, request_id="r", worker_epoch=1, handle=handle, spec=spec()
        )
    )
    await until(lambda: world.step() is None and handle.number in world.router.ends, "its end came")
    end, tokens = world.sent(handle.number)
    if loaded:
        assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE and len(tokens) == 4
    else:
        assert end.outcome == common_pb2.ATTEMPT_OUTCOME_ABORTED and not tokens
        error = from_wire(end.error)
        assert type(error) is AdapterMissingError and error.field == "adapter"
