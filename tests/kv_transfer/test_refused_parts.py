"""Parts that are not what their header says, and those that the landing thread cannot take: refused, never scattered, and
the thread goes on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cluster.errors import TransportError
from kv_transfer import messages as m
from kv_transfer import receiver_rank
from tests.kv_transfer.pair import TRANSPORTS, assert_same, config, decode_side, prefill_side
from tests.waiting import until

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
        for slot in rank._slots:
            slot.fill_(0x5A)
        handle = rank.handle

        def cut(message: object) -> None:
            if isinstance(message, m.Land):
                message = dataclasses.replace(message, payload=CUTS[name](message.payload))
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


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_part_that_breaks_the_scatter_ends_its_hand_off_only(transport, monkeypatch, caplog):
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:

        def breaks(*arguments: object) -> None:
            raise RuntimeError("no")

        with monkeypatch.context() as patch:
            patch.setattr(receiver_rank, "scatter", breaks)
            handoff = await prefill.open(decode.ref, TOKENS)
            with pytest.raises(TransportError, match="failed"):
                await prefill.finish(handoff, TOKENS)
            await handoff.abort("refused")
        assert decode.receiver.counts["part_failed"] >= 1
        assert "could not be scattered" in caplog.text
        await prefill.send(decode.ref, TOKENS)
        assert_same(prefill, decode, TOKENS)
        assert torch.count_nonzero(decode.caches[0])
        await until(lambda: decode.all_free, "every slot free")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rank_that_can_land_nothing_any_more_ends_its_worker(transport, monkeypatch):
    async with decode_side(config(transport)) as decode:
        ended: list[str] = []
        decode.receiver.on_exhausted = ended.append

        def no_memory(slots: int) -> list[int]:
            raise RuntimeError("no memory for it")

        monkeypatch.setattr(decode.ranks[0], "_add_segment", no_memory)
        decode.ranks[0].handle(m.AddSegment(4))
        await until(lambda: ended, "the worker hears of it")
        assert "rank 0 lands nothing any more" in ended[0]
        assert "no memory for it" in ended[0]
