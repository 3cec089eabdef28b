"""Invalid messages of a decode worker on the control stream end their hand-off, or the link."""

from __future__ import annotations

import asyncio
import itertools
import math
from functools import partial
from typing import Any

import pytest

from cluster.errors import HandoffError, LayoutMismatchError, StaleEpochError, TransportError
from cluster.protocol.wire_version import WIRE_VERSION
from kv_transfer.layout.digest import stricter
from kv_transfer.outbox import MAX_TOGETHER
from kv_transfer.prefill_side import handoff as handoff_module
from kv_transfer.prefill_side import sender
from kv_transfer.prefill_side.rank_connections import KnownWorkers
from tests.harness.waiting import until as until_true
from tests.kv_transfer.pair import DECODE_EPOCH, config, layout, prefill_side
from tests.kv_transfer.prefill_side.scripted_decode import scripted_decode, welcome
from wire import common_pb2, handoff_pb2

until = partial(until_true, seconds=15.0)

TOKENS = 16


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(sender, "LAST_NOTICES_SECONDS", 0.05)


def other_layout(**fields):
    found = layout(1)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize(
    ("said", "error", "field"),
    [
        ({"decode_epoch": DECODE_EPOCH + 1}, StaleEpochError, "decode_epoch"),
        ({"layout": other_layout(wire_version=WIRE_VERSION - 1)}, LayoutMismatchError, "wire_version"),
        ({"layout": other_layout(tensor_parallel=0)}, TransportError, "layout.tensor_parallel"),
        ({"layout": other_layout(tensor_parallel=3)}, TransportError, "layout.tensor_parallel"),
        ({"layout": other_layout(tensor_parallel=1026)}, TransportError, "layout.tensor_parallel"),
        ({"transport": "pigeon"}, TransportError, "transport"),
        ({"transport": "nixl"}, TransportError, "transport"),  # known, and not offered
        ({"slot_bytes": 0}, TransportError, "slot_bytes"),
        ({"digests": "some"}, TransportError, "digests"),
        ({"digest_kind": "crc"}, TransportError, "digest_kind"),
    ],
)
async def test_an_invalid_welcome_ends_the_link(said, error, field):
    async with (
        scripted_decode(welcome=welcome(**said)) as decode,
        prefill_side(config("grpc")) as prefill,
    ):
        with pytest.raises(error) as caught:
            await prefill.open(decode.ref, TOKENS)
        assert caught.value.field == field
        assert prefill.sender.live == 0
        await until(lambda: not prefill.sender._links, "the link is gone")


async def test_parts_follow_the_pairs_agreement_on_digests():
    agreed = welcome(digests="all", digest_kind="sum64")
    async with (
        scripted_decode(welcome=agreed) as decode,
        prefill_side(config("grpc", digests="off")) as prefill,
    ):
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        (hello,) = stream.of("hello")
        assert (hello.digests, list(hello.digest_kinds)) == ("off", ["xxh3_128", "sum64"])
        await until(lambda: bool(stream.of("slot_request")), "slots asked for")
        asked = stream.of("slot_request")[0]
        stream.say(slot_grant=grant(asked))
        await until(lambda: bool(stream.of("part")), "a part")
        header = stream.of("part")[0].header
        assert header.digest_kind == "sum64"
        assert len(header.digest) == 16
        await handoff.abort("enough")


async def test_the_senders_setting_is_a_minimum_too():
    async with (
        scripted_decode(welcome=welcome(digests="off")) as decode,
        prefill_side(config("grpc", digests="all")) as prefill,
    ):
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        await until(lambda: bool(stream.of("slot_request")), "slots asked for")
        stream.say(slot_grant=grant(stream.of("slot_request")[0]))
        await until(lambda: bool(stream.of("part")), "a part")
        assert stream.of("part")[0].header.digest_kind == "xxh3_128"
        await handoff.abort("enough")


def test_the_stricter_setting():
    assert [stricter("sample", theirs) for theirs in ("off", "sample", "all")] == [
        "sample",
        "sample",
        "all",
    ]


def grant(asked: handoff_pb2.SlotRequest, **more: int) -> handoff_pb2.SlotGrant:
    fields: dict[str, Any] = {
        "transfer_id": asked.transfer_id,
        "source_rank": asked.source_rank,
        "target_rank": asked.target_rank,
        "part": asked.part,
        "slot": 0,
        "generation": 1,
        "address": 4096,
    }
    return handoff_pb2.SlotGrant(**{**fields, **more})


@pytest.mark.parametrize("field", ["source_rank", "target_rank"])
@pytest.mark.parametrize("kind", ["slot_grant", "part_result"])
async def test_a_rank_that_does_not_exist_ends_that_hand_off_only(kind, field):
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        doomed = await prefill.open(decode.ref, TOKENS)
        well = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        if kind == "slot_grant":
            asked = handoff_pb2.SlotRequest(transfer_id=doomed.transfer_id)
            stream.say(slot_grant=grant(asked, **{field: 1}))
        else:
            result = handoff_pb2.PartResult(transfer_id=doomed.transfer_id, verified=True)
            setattr(result, field, 1)
            stream.say(part_result=result)
        with pytest.raises(TransportError) as caught:
            await prefill.finish(doomed, TOKENS)
        assert caught.value.field == field
        await doomed.abort("it made no sense")
        finishing = asyncio.create_task(prefill.finish(well, TOKENS))
        await until(lambda: bool(stream.of("finish")), "the other hand-off goes on")
        stream.say(committed=handoff_pb2.Committed(transfer_id=well.transfer_id))
        await finishing
        assert len(decode.streams) == 1, "the link has ended"


async def test_more_messages_than_travel_together_end_the_link():
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        beat = handoff_pb2.DecodeToPrefill(beat=common_pb2.Beat())
        stream.say(beat=common_pb2.Beat(), more=[beat] * (MAX_TOGETHER + 1))
        with pytest.raises(TransportError) as caught:
            await prefill.finish(handoff, TOKENS)
        assert caught.value.field == "more"
        await handoff.abort("it made no sense")


async def test_values_at_the_ends_of_their_ranges_are_no_harm():
    """P passes a slot's number and address to its transport without further checks."""
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        await until(lambda: bool(stream.of("slot_request")), "slots asked for")
        most = {"slot": 2**32 - 1, "generation": 2**64 - 1, "address": 2**64 - 1, "device": 2**64 - 1}
        stream.say(slot_grant=grant(stream.of("slot_request")[0], **most))
        await until(lambda: bool(stream.of("part")), "it is sent to the granted slot")
        assert stream.of("part")[0].header.slot == 2**32 - 1
        await handoff.abort("enough")


async def test_an_address_that_nixl_refuses_ends_the_hand_off():
    async with prefill_side(config("nixl")) as prefill:
        from tests.kv_transfer.pair import decode_side

        async with decode_side(config("nixl")) as decode:
            grants = decode.receiver._grant

            def wrong(rank, claim, slot):
                slot.address = 2**64 - 1
                grants(rank, claim, slot)

            decode.receiver._landing._granted = wrong
            handoff = await prefill.open(decode.ref, TOKENS)
            with pytest.raises(HandoffError):
                await prefill.finish(handoff, TOKENS)
            await handoff.abort("it made no sense")
            decode.receiver._landing._granted = grants


def test_the_number_of_known_decode_workers_is_bounded():
    known = KnownWorkers(max_workers=3)
    for number in range(5):
        known.has_epoch(f"d{number}", number + 1)
        known.is_reached(f"d{number}")
        known.is_reached("d0")  # met again and again
    assert len(known) == 3
    assert [known.epoch(f"d{number}") for number in range(5)] == [1, 0, 0, 4, 5]
    assert [known.was_reached(f"d{number}") for number in range(5)] == [True, False, False, True, True]


async def test_a_sender_keeps_a_bounded_number_of_workers(monkeypatch):
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        prefill.sender.known = KnownWorkers(max_workers=2)
        for number in range(4):
            ref = common_pb2.WorkerRef(worker_id=f"d{number}", epoch=DECODE_EPOCH, address=decode.ref.address)
            handoff = await prefill.open(ref, TOKENS)
            await handoff.abort("enough")
        assert len(prefill.sender.known) == 2


async def test_a_part_that_is_found_corrupted_without_end_ends_its_hand_off():
    """Each time it is granted another slot: blocks and staging would never be free."""
    async with scripted_decode(welcome=welcome()) as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams

        async def answer() -> None:
            for generation in itertools.count(1):
                await until(lambda: len(stream.of("slot_request")) >= generation, "a slot is asked for")  # noqa: B023
                asked = stream.of("slot_request")[-1]
                part = {"transfer_id": asked.transfer_id, "part": asked.part}
                stream.say(slot_grant=handoff_pb2.SlotGrant(**part, slot=0, generation=generation))
                stream.say(part_result=handoff_pb2.PartResult(**part, verified=False))

        answering = asyncio.create_task(answer())
        try:
            with pytest.raises(TransportError, match="corrupted 2 times") as caught:
                async with asyncio.timeout(10):
                    await prefill.finish(handoff, TOKENS)
            assert caught.value.field == "verified"
        finally:
            answering.cancel()
        await handoff.abort("given up")
        await handoff.drained()
        assert prefill.sender.staging_used_bytes == 0


async def test_repeated_and_unasked_answers_do_not_keep_a_hand_off(monkeypatch):
    monkeypatch.setattr(handoff_module, "HANDOFF_STALL_SECONDS", 0.5)
    async with scripted_decode(welcome=welcome()) as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams

        async def answer() -> None:
            for number in itertools.count(1):
                for part in (0, number):
                    grant = handoff_pb2.SlotGrant(
                        transfer_id=handoff.transfer_id, part=part, slot=0, generation=1
                    )
                    stream.say(slot_grant=grant)
                await asyncio.sleep(0.02)

        answering = asyncio.create_task(answer())
        try:
            with pytest.raises(TransportError, match="nothing of the hand-off"):
                async with asyncio.timeout(10):
                    await prefill.finish(handoff, TOKENS)
        finally:
            answering.cancel()
        await handoff.abort("given up")


@pytest.mark.parametrize("seconds", [-math.inf, math.inf, math.nan, -1.0])
async def test_a_false_time_of_a_commit_does_not_make_this_workers_report_false(seconds):
    """It is subtracted from what the hand-off has taken: routers would drop the prefill worker's report, or believe it."""
    async with scripted_decode(welcome=welcome()) as decode, prefill_side(config("grpc")) as prefill:
        handoff = await prefill.open(decode.ref, TOKENS)
        (stream,) = decode.streams
        committed = handoff_pb2.Committed(transfer_id=handoff.transfer_id, commit_seconds=seconds)
        stream.say(committed=committed)
        await until(handoff._committed.done, "the commit is read")
        assert handoff._commit_seconds == 0.0
        await handoff.abort("enough")
