"""What a prefill worker repeats of another's hand-off, or of its own after the end, reaches no block and no slot."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from cluster.errors import StaleTransferError
from kv_transfer.decode_side.ring import SlotState
from tests.harness.waiting import until
from tests.kv_transfer.pair import LAYERS, PAGE, Decode, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer
from wire import handoff_pb2

WHOLE = (0, LAYERS), (0, PAGE)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side(config("grpc")) as side:
        yield side


async def greeted(decode: Decode, name: str) -> ScriptedPeer:
    one = ScriptedPeer(decode.receiver, name)
    one.hello()
    await one.received("welcome")
    return one


def refusals(peer: ScriptedPeer, transfer_id: bytes) -> list[str]:
    return [one.refused.code for one in peer.all("reserve_reply", transfer_id)]


@pytest.mark.parametrize("thief_name", ["thief", "owner"])
async def test_anothers_hand_off_is_not_reserved_again(decode: Decode, thief_name: str) -> None:
    """Also not by a later stream of the same worker: the hand-off ends with the stream that reserved it."""
    owner, thief = await greeted(decode, "owner"), await greeted(decode, thief_name)
    transfer_id = await owner.reserve(PAGE)
    thief.ask_to_reserve(PAGE, transfer_id)
    reply = await thief.received("reserve_reply", transfer_id)
    assert reply.refused.code == StaleTransferError.__name__ and not reply.held_tokens
    thief.want(transfer_id, 0, 64)
    thief.finish(transfer_id, (0, 0, 1))
    thief.say(abort=handoff_pb2.AbortHandoff(transfer_id=transfer_id, reason="mine"))
    assert (await thief.received("aborted", transfer_id)).error.code == StaleTransferError.__name__
    assert not thief.all("slot_grant") and decode.receiver.live == 1
    await owner.send(transfer_id, 0, *WHOLE)
    await owner.verified(transfer_id, 0)
    owner.finish(transfer_id, (0, 0, 1))
    await owner.received("committed", transfer_id)
    assert decode.engine.committed == [transfer_id] and not decode.engine.aborted
    for one in (owner, thief):
        await one.close()


async def test_a_part_again_reaches_nothing(decode: Decode) -> None:
    """By the same worker or another, while its slot is free, and once the slot is another hand-off's."""
    owner, thief = await greeted(decode, "owner"), await greeted(decode, "thief")
    transfer_id = await owner.reserve(PAGE)
    said = owner.say
    parts: list[handoff_pb2.PartData] = []

    def noted(**message: object) -> None:
        parts.extend(one for one in message.values() if isinstance(one, handoff_pb2.PartData))
        said(**message)

    owner.say = noted  # type: ignore[method-assign]
    await owner.send(transfer_id, 0, *WHOLE)
    await owner.verified(transfer_id, 0)
    (part,) = parts
    before, counts = decode.caches[0].clone(), decode.receiver.stats.counts
    part.payload = bytes(len(part.payload))
    for number, peer in enumerate((owner, thief), 1):
        peer.say(part=part)
        await until(lambda number=number: counts["stale_parts"] == number, "it is dropped", 10.0)
    second = await thief.reserve(PAGE)
    thief.want(second, 0, len(part.payload))
    grant = await thief.granted(second, 0)
    assert grant.slot == part.header.slot, "the slot freed last is used first"
    for number, peer in enumerate((owner, thief), 3):
        peer.say(part=part)
        await until(lambda number=number: counts["stale_parts"] == number, "it is dropped", 10.0)
    part.header.generation = grant.generation  # a peer may guess it
    owner.say(part=part)
    await until(lambda: counts["stale_parts"] == 5, "it is dropped", 10.0)
    assert torch.equal(decode.caches[0], before) and decode.count(SlotState.GRANTED) == 1
    for one in (owner, thief):
        await one.close()


async def test_an_ended_hand_off_does_not_begin_again(decode: Decode) -> None:
    owner, thief = await greeted(decode, "owner"), await greeted(decode, "thief")
    transfer_id = await owner.reserve(PAGE)
    owner.say(abort=handoff_pb2.AbortHandoff(transfer_id=transfer_id, reason="given up"))
    await until(lambda: transfer_id in decode.engine.aborted, "it has ended", 10.0)
    for peer in (owner, thief):
        peer.ask_to_reserve(PAGE, transfer_id)
        await until(
            lambda peer=peer: StaleTransferError.__name__ in refusals(peer, transfer_id), "refused", 10.0
        )
    assert decode.receiver.live == 0
    for one in (owner, thief):
        await one.close()
