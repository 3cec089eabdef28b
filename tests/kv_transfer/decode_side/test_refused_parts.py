"""Parts that differ from their header, and those that the landing thread cannot take, are refused and never scattered;
the thread goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.errors import TransportError
from kv_transfer import messages as m
from kv_transfer.decode_side import landing
from kv_transfer.decode_side.ring import SlotState
from kv_transfer.device import cpu
from kv_transfer.outbox import MAX_TOGETHER
from tests.harness.waiting import until
from tests.kv_transfer.pair import LAYERS, PAGE, TRANSPORTS, assert_same, config, decode_side, prefill_side
from tests.kv_transfer.scripted_peer import DECODE_EPOCH, EPOCH, ScriptedPeer
from wire import handoff_pb2

TOKENS = 90
CUTS = {
    "empty": lambda payload: b"",
    "short": lambda payload: payload[:-1],
    "long": lambda payload: payload + b"x",
    "longer than a slot": lambda payload: payload + bytes(1 << 20),
}


@pytest.mark.parametrize("digests", ["off", "all"])
@pytest.mark.parametrize("name", CUTS)
async def test_a_payload_of_another_length_is_refused(name, digests):
    """The rest of its slot is another request's KV."""
    side = config("grpc", digests=digests)
    async with decode_side(side) as decode, prefill_side(side) as prefill:
        rank = decode.ranks[0]
        for slot in rank._memory.slots:
            slot.fill_(0x5A)
        handle = rank.handle

        def cut(message: Any) -> None:
            if isinstance(message, handoff_pb2.PartData):
                message = handoff_pb2.PartData(header=message.header, payload=CUTS[name](message.payload))
            handle(message)

        rank.handle = cut
        handoff = await prefill.open(decode.ref, TOKENS)
        with pytest.raises(TransportError, match="geometry"):
            await prefill.finish(handoff, TOKENS)
        await handoff.abort("refused")
        assert not decode.caches[0].any(), "what lay in the slot is in a block"
        rank.handle = handle
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize(
    "named",
    [
        {"generation": 9},
        {"prefill_epoch": 9},
        {"decode_epoch": 9},
        {"transfer_id": b"x" * 16},
        {"slot": 5},
        {"source_rank": 1},
        {"part": 1},
    ],
    ids=lambda named: next(iter(named)),
)
async def test_a_part_that_is_not_the_one_its_slot_was_granted_to_is_dropped(named):
    """It may be a late one, of an attempt or of a life that is over: the one that is expected is taken after it."""
    async with decode_side(config("grpc")) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello()
        transfer_id = await one.reserve(PAGE)
        part = (transfer_id, 0, (0, LAYERS), (0, PAGE))
        await one.send(*part, **named)
        await until(lambda: decode.receiver.stats.counts["stale_parts"] == 1, "it is dropped", 10.0)
        assert not decode.caches[0].any()
        await one.send(*part)
        await one.verified(transfer_id, 0)
        await one.close()


async def test_a_rank_expects_nothing_from_before_its_worker_was_fenced():
    async with decode_side(config("grpc")) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello()
        transfer_id = await one.reserve(PAGE)
        one.want(transfer_id, 0, 64)
        await one.granted(transfer_id, 0)
        rank, counts = decode.ranks[0], decode.receiver.stats.counts
        rank.handle(m.NewEpoch(9))
        for dropped, epoch in enumerate((DECODE_EPOCH, 9), 1):
            await one.send(transfer_id, 0, (0, LAYERS), (0, PAGE), decode_epoch=epoch)
            await until(
                lambda dropped=dropped: rank.dropped["stale"] + counts["stale_parts"] == dropped,
                "it is dropped",
                10.0,
            )
        assert not decode.caches[0].any()
        await one.close()


async def test_a_rank_gets_a_carried_part_once_for_each_granted_slot():
    """A rank with too many unread messages counts as failed, and its worker ends with it: parts that no slot was granted
    to, and repeated ones, would be as many as a peer likes."""
    async with decode_side(config("grpc")) as decode:
        rank, came = decode.ranks[0], []
        handle = rank.handle

        def counted(message: Any) -> None:
            if isinstance(message, handoff_pb2.PartData):
                came.append(message.header.slot)
            else:
                handle(message)

        rank.handle = counted
        one, other = ScriptedPeer(decode.receiver), ScriptedPeer(decode.receiver, "another")
        one.hello()
        other.hello()
        await other.received("welcome")
        transfer_id = await one.reserve(PAGE)
        header = handoff_pb2.PartHeader(
            prefill_epoch=EPOCH, decode_epoch=DECODE_EPOCH, transfer_id=transfer_id
        )
        flood = [handoff_pb2.PrefillToDecode(part=handoff_pb2.PartData(header=header))] * MAX_TOGETHER
        for _ in range(20):
            one.say(more=flood)
        await one.send(transfer_id, 0, (0, LAYERS), (0, PAGE))
        await until(lambda: len(came) == 1, "the right one")
        grant = await one.granted(transfer_id, 0)
        header.slot, header.generation, header.target_rank = grant.slot, grant.generation, 0
        for peer in (one, other):
            peer.say(part=handoff_pb2.PartData(header=header))
        header.target_rank = 2**32 - 1
        one.say(part=handoff_pb2.PartData(header=header))
        counts = decode.receiver.stats.counts
        await until(lambda: counts["stale_parts"] == 20 * MAX_TOGETHER + 3, "the others are dropped")
        assert came == [grant.slot]
        for peer in (one, other):
            await peer.close()


async def test_a_part_that_arrives_corrupted_twice_ends_its_attempt():
    async with decode_side(config("grpc")) as decode:
        one = ScriptedPeer(decode.receiver)
        one.hello()
        transfer_id = await one.reserve(PAGE)
        corrupted = (transfer_id, 0, (0, LAYERS), (0, PAGE))
        await one.send(*corrupted, digest=bytes(16))
        result = await one.received("part_result", transfer_id)
        assert not result.verified
        one.want(transfer_id, 0, 64)
        await one.received("slot_grant", transfer_id, count=2)
        await one.send(*corrupted, digest=bytes(16))
        aborted = await one.received("aborted", transfer_id)
        assert aborted.error.code == "DigestMismatchError"
        assert len(one.all("part_result")) == 1
        await until(lambda: decode.all_free, "every slot free")
        await one.close()


async def test_a_part_that_does_not_land_in_time_ends_its_attempt(monkeypatch):
    """Its slot is in doubt: it may still land."""
    monkeypatch.setattr(landing, "MAX_PART_SECONDS", 0.05)
    async with decode_side(config("grpc")) as decode:
        decode.receiver.stats.rate_bytes_per_second = 1e-9  # an earlier peer let its bytes trickle
        one = ScriptedPeer(decode.receiver)
        one.hello()
        transfer_id = await one.reserve(PAGE)
        one.want(transfer_id, 0, 64)
        aborted = await one.received("aborted", transfer_id)
        assert aborted.error.code == "TransportError" and "deadline" in aborted.error.message
        assert decode.count(SlotState.QUARANTINED) == 1 and decode.receiver.stats.counts["late_parts"] == 1
        await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
        one.say(drained={"transfer_id": transfer_id})
        await until(lambda: decode.all_free, "every slot free")
        await one.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_part_that_breaks_the_scatter_ends_its_hand_off_only(transport, monkeypatch, caplog):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:

        def breaks(*arguments: object) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(cpu, "scatter", breaks)
            handoff = await prefill.open(decode.ref, TOKENS)
            with pytest.raises(TransportError, match="failed"):
                await prefill.finish(handoff, TOKENS)
            await handoff.abort("refused")
        assert decode.receiver.stats.counts["part_failed"] >= 1
        assert "could not be scattered" in caplog.text
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        assert torch.count_nonzero(decode.caches[0])
        await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rank_that_can_land_nothing_any_more_ends_its_worker(transport, monkeypatch):
    async with decode_side(config(transport)) as decode:
        ended = decode.exhausted

        def no_memory(slots: int) -> list[int]:
            raise RuntimeError("no memory for it")

        monkeypatch.setattr(decode.ranks[0]._memory, "add_segment", no_memory)
        decode.ranks[0].handle(m.AddSegment(4))
        await until(lambda: ended, "the failure is reported")
        assert "rank 0 receives no more parts" in ended[0]
        assert "no memory for it" in ended[0]
