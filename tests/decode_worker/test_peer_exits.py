"""A parent's report ends the quarantine of every epoch of the process that exited, and of no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.quarantine_watch import ReportedPeerExits
from kv_transfer.decode_side.ring import IncomingPart, Ring, SlotState
from tests.harness.waiting import until
from tests.kv_transfer.pair import PAGE, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer


@pytest.fixture
def ring():
    return Ring(list(range(8)), lambda part, slot: None)


def peer_exits(ring):
    async def process_exited(peer):
        ring.fence_proven(lambda part: part.peer == peer)

    receiver = SimpleNamespace(rings=[ring], links=set(), process_exited=process_exited)
    return ReportedPeerExits(receiver)  # type: ignore[arg-type]


async def test_slots_of_all_its_epochs_are_freed_and_no_others(ring):
    for number, peer in enumerate(("p1@a", "p1@b", "p2@a")):
        transfer_id = bytes([number]) * 16
        ring.ask(IncomingPart(transfer_id, peer, 0, 0, 100))
        ring.quarantine(transfer_id)
    async with asyncio.timeout(60):
        await peer_exits(ring).apply("p1")
    assert ring.count(SlotState.QUARANTINED) == 1
    ring.check_integrity()


async def test_the_word_may_come_before_the_broken_connection(ring):
    ring.ask(IncomingPart(b"t" * 16, "p1@a", 0, 0, 100))
    applying = asyncio.create_task(peer_exits(ring).apply("p1"))
    await asyncio.sleep(0.05)
    assert ring.count(SlotState.GRANTED) == 1  # its hand-off has not ended here yet
    ring.quarantine(b"t" * 16)
    async with asyncio.timeout(60):
        await applying
    assert ring.count(SlotState.FREE) == 8


async def test_no_slot_is_free_before_its_rank_has_looked():
    """The last bytes of a process that is dead may lie in a socket."""
    async with decode_side(config("grpc")) as decode:
        gone = ScriptedPeer(decode.receiver)
        gone.hello()
        transfer_id = await gone.reserve(PAGE)
        gone.want(transfer_id, 0, 64)
        await gone.granted(transfer_id, 0)
        await gone.close()
        await until(lambda: decode.count(SlotState.QUARANTINED) == 1, "its slot is in doubt")
        handle = decode.ranks[0].handle
        settles: list[Any] = []

        def kept(message: Any) -> None:
            (settles.append if type(message).__name__ == "Settle" else handle)(message)

        decode.ranks[0].handle = kept
        applying = asyncio.create_task(ReportedPeerExits(decode.receiver).apply(gone.worker.worker_id))
        await until(lambda: len(settles) == 1, "the rank is asked", 15.0)
        assert decode.count(SlotState.QUARANTINED) == 1
        handle(settles[0])
        await applying
        assert decode.all_free


async def test_the_word_may_come_before_the_last_that_the_process_asked_for(ring):
    """It has a hand-off and no slot yet; its request lies in a socket and is read after the report."""
    async with decode_side(config("grpc")) as decode:
        gone, other = ScriptedPeer(decode.receiver), ScriptedPeer(decode.receiver, "another")
        for one in (gone, other):
            one.hello()
        transfer_id, live = await gone.reserve(PAGE), await other.reserve(PAGE)
        async with asyncio.timeout(60):
            await ReportedPeerExits(decode.receiver).apply(gone.worker.worker_id)
        gone.want(transfer_id, 0, 64)
        await until(lambda: gone.ended or bool(gone.all("slot_grant")), "it is read")
        await gone.close()
        await until(lambda: transfer_id in decode.engine.aborted, "its hand-off has ended")
        assert decode.all_free, "a slot is in doubt, and no further word will come"
        other.want(live, 0, 64)
        await other.granted(live, 0)
        await other.close()
