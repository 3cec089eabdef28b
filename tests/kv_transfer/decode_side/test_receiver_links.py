"""A pair's stream at the decode worker: any failure releases what was reserved, and work that waits for the engine does
not block the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import InvalidRequestError, TransportError
from kv_transfer.contract import Reservation
from kv_transfer.decode_side import incoming, landing, peer, ring
from kv_transfer.decode_side.ring import SlotState
from tests.harness.waiting import until as until_true
from tests.kv_transfer.pair import LAYERS, PAGE, Decode, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer
from wire import common_pb2, handoff_pb2

until = partial(until_true, seconds=15.0)

TOKENS = 2 * PAGE
ALL = (0, LAYERS)


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side(config("grpc")) as side:
        yield side


async def test_a_link_that_is_lost_takes_on_no_hand_off(decode):
    """Also before its reader gets the end."""
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.reserve(TOKENS)
    (link,) = decode.receiver._peers.values()
    decode.receiver.peer_lost(link)
    one.ask_to_reserve(TOKENS)
    await until(lambda: one.ended and decode.receiver.live == 0, "all has ended")
    assert len(one.all("reserve_reply")) == 1


@pytest.mark.parametrize("where", ["IncomingHandoff", "plan_flows"])
async def test_a_failure_after_a_reservation_releases_its_blocks(decode, where, monkeypatch):
    taken: list[bytes] = []
    reserve = decode.engine.reserve

    async def counted(spec: Any) -> Reservation:
        taken.append(spec.transfer_id)
        return await reserve(spec)

    decode.engine.reserve = counted
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.received("welcome")

    def fails(*arguments: object, **more: object) -> None:
        raise ZeroDivisionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(incoming, where, fails)
        transfer_id = one.ask_to_reserve(TOKENS)
        reply = await one.received("reserve_reply", transfer_id)
    assert reply.refused.code == "InternalError"
    assert taken == list(decode.engine.aborted), "blocks were taken and not given back"
    assert not decode.ranks[0]._expectations._transfers and decode.receiver.live == 0
    await one.reserve(TOKENS)  # the stream goes on
    await one.close()


async def test_a_rank_forgets_a_transfer_at_its_end(decode):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    committed, aborted, open_one = [await one.reserve(TOKENS) for _ in range(3)]
    rank = decode.ranks[0]
    await until(
        lambda: set(rank._expectations._transfers) == {committed, aborted, open_one},
        "the rank has all of them",
    )
    await one.send(committed, 0, ALL, (0, TOKENS))
    one.finish(committed, (0, 0, 1))
    await one.received("committed", committed)
    one.say(abort={"transfer_id": aborted, "reason": "enough"})
    await until(lambda: set(rank._expectations._transfers) == {open_one}, "the rank has the open one only")
    await one.close()
    await until(lambda: not rank._expectations._transfers, "the rank has none")


async def test_a_peer_that_asks_for_too_many_slots_ends_its_own_hand_off_only(decode, monkeypatch):
    monkeypatch.setattr(ring, "MAX_WAITING", 2)
    one, other = ScriptedPeer(decode.receiver), ScriptedPeer(decode.receiver, "another")
    one.hello()
    other.hello()
    greedy, modest = await one.reserve(TOKENS), await other.reserve(TOKENS)
    share = len(decode.rings[0].slots) // 4
    for part in range(share + 2):
        one.want(greedy, part, 64)
    await one.granted(greedy, share - 1)
    await until(lambda: decode.rings[0].waiting == 2, "what is over its share waits")
    for part in range(2):
        other.want(modest, part, 64)
        await other.granted(modest, part)
    one.want(greedy, share + 2, 64)
    aborted = await one.received("aborted", greedy)
    assert aborted.error.limit == "2"
    assert decode.receiver.live == 1 and not other.all("aborted")
    for stream in (one, other):
        await stream.close()


# --- the engine is slow ------------------------------------------------------------------------------------


class SlowEngine:
    """A DecodeEngine whose answers to reserve and commit wait for `go_on`."""

    def __init__(self, decode: Decode):
        self._engine = decode.engine
        self.reserving: list[bytes] = []
        self.go_on = asyncio.Event()
        self.slow = False
        decode.receiver._engine = self  # type: ignore[assignment]

    async def _wait(self) -> None:
        if self.slow:
            await self.go_on.wait()

    async def reserve(self, spec: Any) -> Reservation:
        self.reserving.append(spec.transfer_id)
        await self._wait()
        return await self._engine.reserve(spec)

    async def commit(self, *arguments: Any) -> None:
        await self._wait()
        await self._engine.commit(*arguments)

    async def abort(self, transfer_id: bytes, verified_tokens: int) -> None:
        await self._wait()
        await self._engine.abort(transfer_id, verified_tokens)


@pytest.fixture
def slow(decode: Decode) -> SlowEngine:
    return SlowEngine(decode)


async def test_a_slow_engine_holds_up_no_slot_request(decode, slow):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    first, second = await one.reserve(TOKENS), await one.reserve(TOKENS)
    await one.send(first, 0, ALL, (0, TOKENS))
    await one.verified(first, 0)
    slow.slow = True
    one.ask_to_reserve(TOKENS)
    one.finish(first, (0, 0, 1))
    await one.send(second, 0, ALL, (0, TOKENS))  # a grant is waited for
    await one.verified(second, 0)
    assert not one.all("committed")
    slow.go_on.set()
    await one.received("committed", first)
    await one.received("reserve_reply", count=3)
    await one.close()


async def test_messages_of_one_transfer_stay_in_order(decode, slow):
    """An Abort that arrives while the engine still works on the Reserve: afterwards nothing is held."""
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.received("welcome")
    slow.slow = True
    transfer_id = one.ask_to_reserve(TOKENS)
    one.say(abort={"transfer_id": transfer_id, "reason": "too slow"})
    other = one.ask_to_reserve(TOKENS)
    await until(lambda: slow.reserving == [transfer_id, other], "both are asked of the engine")
    slow.go_on.set()
    await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
    await one.received("reserve_reply", other)
    assert decode.receiver.live == 1
    await one.close()


async def test_reservations_that_wait_are_bounded(decode, slow, monkeypatch):
    monkeypatch.setattr(peer, "MAX_RESERVING", 4)
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.received("welcome")
    slow.slow = True
    asked = [one.ask_to_reserve(TOKENS) for _ in range(6)]
    for transfer_id in asked[4:]:
        reply = await one.received("reserve_reply", transfer_id)
        assert reply.refused.code == "BlocksExhaustedError" and reply.refused.limit == "4"
    assert len(slow.reserving) == 4
    slow.go_on.set()
    for transfer_id in asked[:4]:
        reply = await one.received("reserve_reply", transfer_id)
        assert not reply.HasField("refused")
    await one.reserve(TOKENS)
    await one.close()


async def test_a_peer_that_asks_and_asks_ends_its_stream(decode, slow, monkeypatch):
    monkeypatch.setattr(peer, "MAX_PENDING", 8)
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.received("welcome")
    slow.slow = True
    transfer_id = one.ask_to_reserve(TOKENS)
    await until(lambda: bool(slow.reserving), "asked of the engine")
    for _ in range(20):
        one.say(abort={"transfer_id": transfer_id, "reason": "again"})
    await until(lambda: one.ended, "the stream has ended")
    assert isinstance(one.failure, TransportError) and one.failure.limit == "8"
    slow.go_on.set()
    await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
    assert decode.receiver.live == 0


async def test_bytes_that_wait_are_bounded(decode, slow, monkeypatch):
    """512 reservations could have 64 MiB each."""
    monkeypatch.setattr(peer, "MAX_PENDING_BYTES", 5000)
    one = ScriptedPeer(decode.receiver)
    one.hello()
    slow.slow = True
    transfers = [one.ask_to_reserve(500) for _ in range(4)]  # of 2 KB each
    replies = [await one.received("reserve_reply", transfer) for transfer in transfers[2:]]
    assert {reply.refused.code for reply in replies} == {"BlocksExhaustedError"}
    (link,) = decode.receiver._peers.values()
    assert 4000 < link._in_turn.pending_bytes <= 5000
    slow.go_on.set()
    for transfer in transfers[:2]:
        assert not (await one.received("reserve_reply", transfer)).HasField("refused")
    await until(lambda: link._in_turn.pending_bytes == 0, "none waits")


async def test_what_waits_keeps_nothing_of_what_came_with_it():
    """A field of a message keeps the memory of all of it."""
    waiting: list[Any] = []

    async def reserve(link: Any, request: Any) -> None:
        waiting.append(request)

    requests: Any = SimpleNamespace(reserve=reserve)
    tasks: list[Any] = []
    link = peer.PeerLink(requests, None, tasks.append, lambda kind, name: None)  # type: ignore[arg-type]
    message = handoff_pb2.PrefillToDecode(reserve=handoff_pb2.Reserve(transfer_id=bytes(16)))
    link._reserve(message.reserve)
    await tasks.pop()
    assert waiting == [message.reserve] and waiting[0] is not message.reserve


async def test_a_stream_without_hello_ends(decode, monkeypatch):
    """Beats alone would keep it open for ever."""
    monkeypatch.setattr(peer, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(peer, "BEAT_SECONDS", 0.05)
    one, greeted = ScriptedPeer(decode.receiver), ScriptedPeer(decode.receiver, "greeted")
    one.say(beat=common_pb2.Beat())
    greeted.hello()
    await until(lambda: one.ended, "it has ended")
    assert isinstance(one.failure, InvalidRequestError) and one.failure.field == "hello"
    beats = len(greeted.all("beat"))
    await until(lambda: len(greeted.all("beat")) > beats, "the other one goes on")


async def test_a_stream_that_ends_meanwhile_asks_the_engine_for_nothing_more(decode, slow):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    await one.received("welcome")
    slow.slow = True
    transfer_id = one.ask_to_reserve(TOKENS)
    one.say(abort={"transfer_id": transfer_id, "reason": "behind it"})
    await until(lambda: slow.reserving == [transfer_id], "asked of the engine")
    await one.close()
    slow.go_on.set()
    await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
    assert decode.receiver.live == 0


# --- Drained -----------------------------------------------------------------------------------------------


async def in_doubt(decode: Decode, one: ScriptedPeer) -> bytes:
    transfer_id = await one.reserve(TOKENS)
    one.want(transfer_id, 0, 64)
    await one.granted(transfer_id, 0)
    one.say(abort={"transfer_id": transfer_id, "reason": "enough"})
    await until(lambda: decode.count(SlotState.QUARANTINED) == 1, "its slot is in doubt")
    return transfer_id


async def test_drained_is_acknowledged_once_it_was_acted_upon(decode):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    transfer_id = await in_doubt(decode, one)
    handle, settles = decode.ranks[0].handle, []

    def kept(message: Any) -> None:
        if type(message).__name__ == "Settle":
            settles.append(message)
        else:
            handle(message)

    decode.ranks[0].handle = kept
    for _ in range(3):
        one.say(drained={"transfer_id": transfer_id})
    await until(lambda: len(settles) == 1, "the rank is asked")
    one.say(beat=common_pb2.Beat())
    assert not one.all("drained_ack"), "acknowledged while the slot is in doubt"
    handle(settles[0])
    await one.received("drained_ack", transfer_id)
    assert decode.all_free
    assert len(settles) == 1, "said again meanwhile, it was begun again"
    one.say(drained={"transfer_id": transfer_id})  # it is in doubt no more
    await one.received("drained_ack", transfer_id, count=2)
    await one.close()


async def test_drained_of_a_transfer_that_was_never_here_is_acknowledged(decode):
    one = ScriptedPeer(decode.receiver)
    one.hello()
    one.say(drained={"transfer_id": bytes(16)})
    await one.received("drained_ack", bytes(16))
    await one.close()


async def test_drained_does_not_wait_for_the_engine(decode, slow):
    """For a live hand-off: its slots are free during the engine's step, its blocks only after it."""
    one = ScriptedPeer(decode.receiver)
    one.hello()
    transfer_id = await one.reserve(TOKENS)
    one.want(transfer_id, 0, 64)
    await one.granted(transfer_id, 0)
    slow.slow = True
    one.say(drained={"transfer_id": transfer_id})
    await one.received("drained_ack", transfer_id)
    assert decode.all_free and not decode.engine.aborted
    slow.go_on.set()
    await until(lambda: transfer_id in decode.engine.aborted, "its blocks are given back")
    await one.close()


async def test_no_other_worker_ends_a_doubt_or_a_hand_off(decode):
    one, other = ScriptedPeer(decode.receiver), ScriptedPeer(decode.receiver, "another")
    one.hello()
    other.hello()
    doubtful, live = await in_doubt(decode, one), await one.reserve(TOKENS)
    for transfer_id in (doubtful, live):
        other.say(drained={"transfer_id": transfer_id})
        await other.received("drained_ack", transfer_id)
    assert decode.count(SlotState.QUARANTINED) == 1, "the doubt ended by another's word"
    assert decode.receiver.live == 1
    # The same worker under its next epoch, on another stream: its word counts.
    again = ScriptedPeer(decode.receiver)
    again.worker.epoch += 1
    again.hello()
    again.say(drained={"transfer_id": doubtful})
    await again.received("drained_ack", doubtful)
    assert decode.all_free
    for stream in (one, other, again):
        await stream.close()


async def test_a_rank_that_does_not_settle_gets_no_acknowledgement(decode, monkeypatch, caplog):
    monkeypatch.setattr(landing, "ANSWER_SECONDS", 0.05)
    one = ScriptedPeer(decode.receiver)
    one.hello()
    transfer_id = await in_doubt(decode, one)
    handle = decode.ranks[0].handle
    decode.ranks[0].handle = lambda message: None
    reasons = decode.exhausted
    one.say(drained={"transfer_id": transfer_id})
    await until(lambda: bool(reasons), "the worker gives itself up")
    assert not one.all("drained_ack")
    assert decode.count(SlotState.QUARANTINED) == 1
    decode.ranks[0].handle = handle
    await one.close()
