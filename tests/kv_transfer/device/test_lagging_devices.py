"""Whole hand-offs between devices that lag behind their hosts: the bytes that the engine computes last arrive, and nothing
stays in use."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kv_transfer.decode_side.ring import SlotState
from kv_transfer.prefill_side.handoff import OutgoingHandoff
from tests.harness.waiting import until
from tests.kv_transfer.device.lagging_device import LaggingDevice
from tests.kv_transfer.pair import (
    BLOCKS,
    LAYERS,
    PAGE,
    TRANSPORTS,
    Decode,
    Prefill,
    config,
    decode_side,
    prefill_side,
)
from wire import common_pb2, handoff_pb2

TOKENS = 60
OWN = -(-TOKENS // PAGE)
HANDOFFS = 4


@pytest.fixture
def devices() -> Iterator[tuple[LaggingDevice, LaggingDevice]]:
    both = LaggingDevice(1), LaggingDevice(2)
    yield both
    for device in both:
        device.close()


async def compute(prefill: Prefill, device: LaggingDevice, decode: Decode, number: int) -> OutgoingHandoff:
    """A hand-off of the blocks [OWN · number, …), whose KV the device computes behind its host: first something wrong,
    then its number."""
    request_id = secrets.token_hex(8)
    spec = common_pb2.GenerateSpec(n=1, prompt_tokens=bytes(4 * TOKENS))
    reserve = handoff_pb2.Reserve(
        transfer_id=secrets.token_bytes(16), request_id=request_id, spec=spec, token_count=TOKENS
    )
    decode.engine.block_ids = list(range(OWN * number, OWN * (number + 1)))
    handoff = await prefill.sender.reserve(decode.ref, reserve, 10.0)
    await handoff.start(request_id)
    blocks = decode.engine.block_ids
    cache = prefill.caches[0]
    for layer in range(LAYERS):
        for value in (-1.0, 10.0 * number + layer):
            device.enqueue(partial(fill, cache, blocks, layer, value))
        prefill.ranks[0].layer_computed(request_id, layer, 0, TOKENS, blocks)
    return handoff


def fill(cache: torch.Tensor, blocks: list[int], layer: int, value: float) -> None:
    for block in blocks:
        cache[block, layer] = value


def assert_arrived(decode: Decode, number: int) -> None:
    for layer in range(LAYERS):
        for token in range(TOKENS):
            row = decode.caches[0][OWN * number + token // PAGE, layer, :, :, token % PAGE]
            assert row.eq(10.0 * number + layer).all(), (number, layer, token)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_computed_arrives(transport, devices):
    source, target = devices
    assert HANDOFFS * OWN <= BLOCKS
    async with (
        decode_side(config(transport), device=target.device) as decode,
        prefill_side(config(transport), device=source.device) as prefill,
    ):
        decode.receiver.stats.rate_bytes_per_second = 1.0  # a part may take as long as the test
        handoffs = [await compute(prefill, source, decode, number) for number in range(HANDOFFS)]
        await asyncio.gather(*(prefill.finish(handoff, TOKENS) for handoff in handoffs))
        for number in range(HANDOFFS):
            assert_arrived(decode, number)
        await until(lambda: decode.all_free, "every slot free")
        await until(lambda: not prefill.sender.staging_used_bytes, "staging free")
        assert not source.copiers[0].unreleased


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_aborted_hand_offs_touch_nothing_after_their_blocks_are_free(transport, devices):
    source, target = devices
    async with (
        decode_side(config(transport), device=target.device) as decode,
        prefill_side(config(transport), device=source.device) as prefill,
    ):
        decode.receiver.stats.rate_bytes_per_second = 1.0  # a part may take as long as the test
        handoffs = [await compute(prefill, source, decode, number) for number in range(HANDOFFS)]
        for handoff in handoffs:
            await handoff.abort("the test")
            await until(lambda one=handoff: one.transfer_id in decode.engine.aborted, "its blocks are free")
            number = handoffs.index(handoff)
            own = decode.caches[0][OWN * number : OWN * (number + 1)]
            own.fill_(-7.0)  # their next owner's
        await until(lambda: not prefill.sender.live, "drained")
        await until(lambda: decode.count(SlotState.QUARANTINED) == 0 and decode.all_free, "every slot free")
        await until(
            lambda: not target.copiers[0].waiting and not source.copiers[0].waiting, "nothing enqueued"
        )
        assert decode.caches[0][: OWN * HANDOFFS].eq(-7.0).all(), "written after the blocks were given back"
        assert not prefill.sender.staging_used_bytes and not source.copiers[0].unreleased
