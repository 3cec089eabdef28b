"""Drained is repeated until it is acknowledged: its delivery does not prove that it was acted upon."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from kv_transfer.prefill_side import pending_drain_notices, sender
from kv_transfer.prefill_side.rank_connections import worker_key
from tests.harness.waiting import until as until_true
from tests.kv_transfer.pair import config, prefill_side
from tests.kv_transfer.prefill_side.scripted_decode import scripted_decode

until = partial(until_true, seconds=15.0)

TOKENS = 16


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(sender, "LAST_NOTICES_SECONDS", 0.05)


async def given_up(prefill, decode):
    """The transfer id of an aborted hand-off without pending writes."""
    handoff = await prefill.open(decode.ref, TOKENS)
    await handoff.abort("no more")
    await handoff.drained()
    return handoff.transfer_id


async def test_it_is_repeated_on_an_open_stream_until_it_is_acknowledged():
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        transfer = await given_up(prefill, decode)
        await until(lambda: list(decode.drained()).count(transfer) >= 4, "said again and again")
        assert len(decode.streams) == 1
        decode.acknowledge(decode.streams[0], transfer)
        await until(lambda: not prefill.sender.notices.waits_for(worker_key(decode.ref)), "acknowledged")
        await asyncio.sleep(0.1)  # what was on its way
        said = len(list(decode.drained()))
        await asyncio.sleep(0.3)  # several pauses between two repetitions
        assert len(list(decode.drained())) == said


async def test_a_message_read_but_not_acted_upon_is_repeated_on_the_next_stream():
    """The worker read the message long ago, but its stream broke before it acted on it."""
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        transfer = await given_up(prefill, decode)
        await until(lambda: transfer in set(decode.drained()), "it has read it")
        (link,) = prefill.sender._links.values()
        link._stream.last_received = time.monotonic() + 3600.0  # it has received something since, too
        decode.streams[0].end()
        await until(lambda: len(decode.streams) > 1, "a stream is opened for it")
        await until(lambda: bool(decode.streams[1].of("drained")), "said on the next stream")
        assert decode.streams[1].of("drained")[0].transfer_id == transfer
        decode.acknowledge(decode.streams[1], transfer)
        await until(lambda: not prefill.sender.notices.waits_for(worker_key(decode.ref)), "acknowledged")


async def test_a_stream_that_the_next_hand_off_opens_carries_it_at_once(monkeypatch):
    monkeypatch.setattr(pending_drain_notices, "TRY_SECONDS", 60.0)
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        transfer = await given_up(prefill, decode)
        await until(lambda: transfer in set(decode.drained()), "it has read it")
        decode.streams[0].end()
        await until(lambda: all(link.lost for link in prefill.sender._links.values()), "the stream is lost")
        await given_up(prefill, decode)
        await until(lambda: bool(decode.streams[1].of("drained")), "said on the next stream")
        assert decode.streams[1].of("drained")[0].transfer_id == transfer


async def test_every_hand_off_sends_drained_until_none_waits():
    async with scripted_decode(acknowledges=True) as decode, prefill_side(config("grpc")) as prefill:
        transfers = [await given_up(prefill, decode) for _ in range(20)]
        await until(lambda: not prefill.sender.notices.waits_for(worker_key(decode.ref)), "all acknowledged")
        assert set(decode.drained()) == set(transfers)
        assert prefill.sender.live == 0


async def test_an_abandoned_reservation_sends_drained_too(monkeypatch):
    """D may have reserved and granted slots that will never be written to."""
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        await given_up(prefill, decode)
        monkeypatch.setattr(decode.streams[0], "say", lambda **message: None)
        opening = asyncio.create_task(prefill.open(decode.ref, TOKENS))
        await until(lambda: len(decode.streams[0].of("reserve")) == 2, "asked")
        opening.cancel()
        await asyncio.wait([opening])
        transfer = decode.streams[0].of("reserve")[1].transfer_id
        await until(lambda: transfer in set(decode.drained()), "said")
        assert transfer in prefill.sender.notices._waiting[worker_key(decode.ref)]


async def test_a_closing_sender_waits_briefly_for_acknowledgements(monkeypatch):
    async with scripted_decode() as decode, prefill_side(config("grpc")) as prefill:
        transfer = await given_up(prefill, decode)
        monkeypatch.setattr(sender, "LAST_NOTICES_SECONDS", 15.0)
        closing = asyncio.create_task(prefill.sender.close())
        await until(lambda: transfer in set(decode.drained()), "said")
        await asyncio.sleep(0.1)
        assert not closing.done(), "D has not acted on it yet"
        decode.acknowledge(decode.streams[0], transfer)
        async with asyncio.timeout(10):
            await closing
