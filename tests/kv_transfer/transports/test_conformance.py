"""Requirements of every transport, through the product's own path: equal bytes, no corrupted part in a block, and no
part that is late, repeated or of another epoch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from cluster.errors import BatonError, DigestMismatchError, InternalError
from kv_transfer import messages as m
from kv_transfer.decode_side import landing
from kv_transfer.device import cpu
from kv_transfer.layout import geometry
from kv_transfer.layout.digest import XXH3_128
from kv_transfer.layout.geometry import Flow
from kv_transfer.layout.rows import CacheRegion
from kv_transfer.prefill_side import part_source
from tests.harness.waiting import until
from tests.kv_transfer.pair import (
    DECODE_EPOCH,
    HEADS,
    PAGE,
    PREFILL_EPOCH,
    TRANSPORTS,
    assert_same,
    before_verify,
    config,
    decode_side,
    endpoint,
    prefill_side,
    tokens_of,
)
from wire import handoff_pb2

TOKENS = 90  # of 64-token parts at most: several parts, the last block cut


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
async def test_the_same_bytes_arrive(transport, prefill_tp, decode_tp):
    async with (
        decode_side(config(transport), decode_tp) as decode,
        prefill_side(config(transport), prefill_tp) as prefill,
    ):
        for tokens, held in ((TOKENS, 0), (TOKENS + 47, 2 * PAGE), (1, 0), (PAGE, 0)):
            decode.engine.held_tokens = held
            report = await prefill.send(decode.ref, tokens)
            assert report.transport == transport
            assert report.held_tokens == held
            assert_same(prefill, decode, tokens)
        assert len(decode.engine.committed) == 4
        await until(lambda: decode.all_free, "every slot free")
        await until(lambda: all(not rank.staging_used_bytes for rank in prefill.ranks), "staging free")


def flip(times: int):
    """A fault at `before_verify`: the first byte of a part is wrong, `times` times."""
    left = [times]

    def corrupt(data: torch.Tensor) -> None:
        if left[0]:
            left[0] -= 1
            data[0] ^= 0xFF

    return corrupt


async def test_a_corrupted_part_is_sent_once_more(transport):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        before_verify(decode.ranks[0], flip(1))
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        assert decode.receiver.stats.counts["part_digest"] == prefill.sender.stats.resends == 1


async def test_a_part_corrupted_twice_ends_the_attempt_and_is_never_scattered(transport):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        before_verify(decode.ranks[0], flip(1000))
        handoff = await prefill.open(decode.ref, TOKENS)
        with pytest.raises(DigestMismatchError):
            await prefill.finish(handoff, TOKENS)
        await handoff.abort("corrupted")
        await until(lambda: handoff.transfer_id in decode.engine.aborted, "aborted")
        assert decode.engine.aborted[handoff.transfer_id] == 0
        assert not decode.caches[0].any(), "a corrupted part is in a block"
        await until(lambda: decode.all_free, "the slots free again: the sender has said Drained")
        before_verify(decode.ranks[0], lambda data: None)
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_whole_blocks_are_written_as_they_lie(monkeypatch, tensor_parallel):
    """And a cut one from a copy; a part that arrived corrupted is read once more from where it lies."""
    copied: list[range] = []

    def gather(cache, data, region: CacheRegion) -> None:
        copied.append(region.tokens)
        geometry.gather(cache, data, region)

    monkeypatch.setattr(part_source, "MIN_PIECE_BYTES", 1)
    monkeypatch.setattr(cpu, "gather", gather)
    side = config("nixl")
    async with (
        decode_side(side, tensor_parallel) as decode,
        prefill_side(side, tensor_parallel) as prefill,
    ):
        before_verify(decode.ranks[0], flip(1))
        await prefill.send(decode.ref, TOKENS // PAGE * PAGE)
        assert_same(prefill, decode, TOKENS // PAGE * PAGE)
        assert not copied and prefill.sender.stats.resends == 1
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        assert copied and all(tokens.start % PAGE or tokens.stop % PAGE for tokens in copied)


def header(expected: handoff_pb2.SlotGrant, **wrong: object) -> handoff_pb2.PartHeader:
    """Of a part that would be taken, but for what is wrong."""
    fields: dict[str, Any] = {
        "transfer_id": expected.transfer_id,
        "prefill_epoch": PREFILL_EPOCH,
        "decode_epoch": DECODE_EPOCH,
        "generation": expected.generation,
        "slot": expected.slot,
        "source_rank": expected.source_rank,
        "part": expected.part,
        "layer_end": 1,
        "token_end": PAGE,
        "head_end": 2,
        "bytes": 2 * 2 * PAGE * 8 * 4,
    }
    return handoff_pb2.PartHeader(**{**fields, **wrong})


WRONG = {
    "generation": 7,
    "transfer_id": b"x" * 16,
    "prefill_epoch": 9,
    "decode_epoch": 9,
    "part": 5,
    "source_rank": 3,
    "slot": 2,
}


async def test_stale_parts_are_dropped_and_counted(transport):
    """Each field alone; and a good part twice."""
    async with decode_side(config(transport)) as decode:
        rank = decode.ranks[0]
        landed: list[Any] = []
        rank._on_event = landed.append
        slot = rank._memory.slots[1]
        expected = handoff_pb2.SlotGrant(slot=1, generation=4, transfer_id=b"t" * 16)
        flows = [Flow(0, 0, 0, HEADS)]
        rank.handle(
            m.ExpectTransfer(expected.transfer_id, PREFILL_EPOCH, [5], 0, PAGE, flows, "off", XXH3_128)
        )
        rank.handle(expected)
        writer = endpoint() if transport == "nixl" else None
        if writer is not None:
            writer.connect(rank.hello.agent_name, rank.hello.metadata)

        def say(part: handoff_pb2.PartHeader) -> None:
            if writer is not None:
                writer.notify(rank.hello.agent_name, part.SerializeToString())
            else:
                rank.handle(handoff_pb2.PartData(header=part, payload=b"\xff" * part.bytes))

        def dropped(kind: str) -> int:
            if writer is not None:
                writer.arrivals()  # its own side must be polled too
            return rank.dropped[kind]

        for name, value in WRONG.items():
            say(header(expected, **{name: value}))
        await until(lambda: dropped("stale") == len(WRONG), "all dropped")
        assert not slot.any(), "a stale part has written into another's slot"
        say(header(expected))
        await until(lambda: bool(dropped("stale") and landed), "the good one")
        assert landed[0].parts[0].error == ""
        say(header(expected))
        await until(lambda: dropped("stale") == len(WRONG) + 1, "the repeated one dropped")
        assert len(landed) == 1
        if writer is not None:
            writer.notify(rank.hello.agent_name, b"\xff\xff")
            await until(lambda: dropped("malformed") == 1, "malformed")
            writer.close()


@pytest.mark.parametrize(("discard", "kept"), [(False, TOKENS), (True, 0)])
async def test_blocks_shipped_by_a_failed_computation_are_not_kept(transport, discard, kept):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (incoming,) = decode.receiver._live.values()
        await until(lambda: incoming.parts.coverage.whole, "every part is here")
        await handoff.abort("the engine failed of it", discard=discard)
        await until(lambda: handoff.transfer_id in decode.engine.aborted, "aborted")
        assert decode.engine.aborted[handoff.transfer_id] == kept


async def test_blocks_are_freed_only_when_no_scatter_runs(transport):
    """An abort while a rank is at one of the parts waits for it."""
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        inside, go_on = threading.Event(), threading.Event()

        def wait(data: torch.Tensor) -> None:
            inside.set()
            go_on.wait(10)

        before_verify(decode.ranks[0], wait)
        handoff = await prefill.open(decode.ref, TOKENS)
        await until(inside.is_set, "a part at the rank")
        aborting = asyncio.create_task(decode.receiver.abort(handoff.transfer_id))
        with pytest.raises(BatonError):
            await prefill.finish(handoff, TOKENS)
        assert not aborting.done()
        assert not decode.engine.aborted, "freed under the rank's hands"
        go_on.set()
        await aborting
        assert handoff.transfer_id in decode.engine.aborted
        before = tokens_of(decode.caches, range(64), 256).clone()
        await handoff.abort("over")
        await until(lambda: decode.all_free, "every slot free")
        assert torch.equal(before, tokens_of(decode.caches, range(64), 256)), "scattered after the abort"


async def test_a_rank_that_does_not_answer_ends_the_worker_and_keeps_its_blocks(transport, monkeypatch):
    monkeypatch.setattr(landing, "ANSWER_SECONDS", 0.1)
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        inside, go_on = threading.Event(), threading.Event()

        def wait(data: torch.Tensor) -> None:
            inside.set()
            go_on.wait(10)

        before_verify(decode.ranks[0], wait)
        reasons = decode.exhausted
        handoff = await prefill.open(decode.ref, TOKENS)
        await until(inside.is_set, "a part at the rank")
        with pytest.raises(InternalError, match="not answered"):
            await decode.receiver.abort(handoff.transfer_id)
        assert len(reasons) == 1
        assert not decode.engine.aborted
        go_on.set()
        await handoff.abort("over")
        with pytest.raises(BatonError):
            await prefill.open(decode.ref, TOKENS)
