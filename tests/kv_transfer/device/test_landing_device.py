"""A receiving rank whose device lags behind: what is written when, and which slots and blocks stay in use until then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import torch

from kv_transfer.decode_side import landing
from kv_transfer.decode_side.receiver_rank import SETTLE_POLLS, Settling
from kv_transfer.decode_side.ring import SlotState
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.rows import CacheRegion
from tests.harness.waiting import until
from tests.kv_transfer.device.scripted_copier import ScriptedCopier
from tests.kv_transfer.pair import LAYERS, PAGE, Decode, Device, config, decode_side
from tests.kv_transfer.scripted_peer import ScriptedPeer
from wire import common_pb2

ALL = (0, LAYERS)
TOKENS = 2 * PAGE


@dataclass
class Rig:
    decode: Decode
    copier: ScriptedCopier
    peer: ScriptedPeer

    async def works(self, *names: str) -> None:
        await until(lambda: self.copier.names == [*names], f"{names} enqueued", 15)

    async def part(self, number: int = 0, tokens: tuple[int, int] = (0, TOKENS), **changed: object) -> bytes:
        transfer_id = await self.peer.reserve(tokens[1])
        await self.peer.send(transfer_id, number, ALL, tokens, **changed)  # type: ignore[arg-type]
        return transfer_id

    async def turn(self) -> None:
        """All that the peer has said is done: its next hand-off is reserved."""
        await self.peer.reserve(PAGE)
        rank = self.decode.ranks[0]
        polls = rank._settling._polls
        await until(lambda: rank._settling._polls > polls + 3, "the rank's thread has looked around")

    def count(self, state: SlotState) -> int:
        return self.decode.count(state)

    @property
    def cache(self) -> torch.Tensor:
        return self.decode.caches[0]


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    copiers: list[ScriptedCopier] = []

    def make(cache: torch.Tensor, part_bytes: int) -> ScriptedCopier:
        copiers.append(ScriptedCopier(CpuCopier(cache)))
        return copiers[0]

    monkeypatch.setattr(landing, "ANSWER_SECONDS", 60.0)
    async with decode_side(config("grpc"), device=Device(make)) as decode:
        decode.receiver.stats.rate_bytes_per_second = 1.0  # a part may take as long as the test
        peer = ScriptedPeer(decode.receiver)
        peer.hello()
        await peer.received("welcome")
        yield Rig(decode, copiers[0], peer)
        for work in copiers[0].waiting:
            work.value = True
        await peer.close()


async def test_a_part_is_scattered_once_verified_and_its_slot_free_once_scattered(rig):
    transfer_id = await rig.part()
    await rig.works("digest")
    await rig.turn()
    assert rig.copier.names == ["digest"] and rig.count(SlotState.GRANTED) == 1
    rig.copier.end_next("digest")
    await rig.works("scatter")
    await rig.turn()
    assert rig.count(SlotState.GRANTED) == 1, "the device still reads the slot"
    assert not rig.peer.all("part_result") and not rig.cache.any()
    for mark in rig.copier.marks:
        mark.value = True
    rig.copier.end_next("scatter")
    assert (await rig.peer.received("part_result", transfer_id)).verified
    assert rig.cache.eq(1.0).any()
    await until(lambda: rig.decode.all_free, "the slot is free")


async def test_blocks_are_written_after_the_engines_last_use_of_them(rig):
    """A step that the engine had enqueued before the reservation may still read or write them."""
    await rig.part()
    await rig.works("digest")
    rig.copier.end_next("digest")
    await rig.works("scatter")
    (work,) = rig.copier.waiting
    assert work.after is rig.copier.marks[0]
    with pytest.raises(AssertionError, match="before the mark"):
        work.end()


async def test_a_hand_off_commits_after_its_last_scatter(rig):
    transfer_id = await rig.part()
    token = common_pb2.Token(position=TOKENS, token_id=1)
    rig.peer.say(
        finish={
            "transfer_id": transfer_id,
            "first_tokens": [token],
            "flows": [{"source_rank": 0, "target_rank": 0, "parts": 1}],
        }
    )
    await rig.works("digest")
    rig.copier.end_next("digest")
    await rig.works("scatter")
    await rig.turn()
    assert not rig.decode.engine.committed
    rig.copier.end_marks()
    rig.copier.end_next("scatter")
    await rig.peer.received("committed", transfer_id)


async def test_a_corrupted_part_is_never_enqueued_to_be_scattered(rig):
    transfer_id = await rig.part(digest=bytes(16))
    await rig.works("digest")
    rig.copier.end_next("digest")
    assert not (await rig.peer.received("part_result", transfer_id)).verified
    assert rig.copier.names == [] and not rig.cache.any()


@pytest.mark.parametrize("state", ["digest", "scatter"])
async def test_blocks_and_slot_of_an_aborted_hand_off_are_in_use_until_the_device_has_ended(rig, state):
    transfer_id = await rig.part()
    await rig.works("digest")
    if state == "scatter":
        rig.copier.end_next("digest")
        await rig.works("scatter")
    rig.peer.say(abort={"transfer_id": transfer_id, "reason": "the test"})
    rig.peer.say(drained={"transfer_id": transfer_id})
    await rig.peer.received("aborted", transfer_id)
    await rig.turn()
    rank = rig.decode.ranks[0]
    polls = rank._settling._polls
    await until(
        lambda: rank._settling._polls > polls + 2 * SETTLE_POLLS, "longer than bytes stay in a socket"
    )
    assert transfer_id not in rig.decode.engine.aborted, "its blocks are given to another request"
    assert rig.count(SlotState.QUARANTINED) == 1, "its slot is given to another part"
    assert not rig.peer.all("drained_ack", transfer_id)
    rig.copier.end_marks()
    rig.copier.end_next(state)
    await until(lambda: transfer_id in rig.decode.engine.aborted, "its blocks are free")
    await rig.peer.received("drained_ack", transfer_id)
    assert rig.count(SlotState.QUARANTINED) == 0
    assert rig.copier.names == [], "nothing of it is scattered any more"
    assert not rig.peer.all("part_result", transfer_id)


async def test_other_hand_offs_end_while_the_device_still_works_on_one(rig):
    """Their parts came later: an abort waits for its own work and for what was enqueued before it."""
    first = await rig.part()
    await rig.works("digest")
    second = await rig.peer.reserve(PAGE)
    rig.peer.say(abort={"transfer_id": second, "reason": "the test"})
    await until(lambda: second in rig.decode.engine.aborted, "ended")
    assert first not in rig.decode.engine.aborted


async def test_the_deadline_of_a_part_counts_until_it_is_scattered(rig, monkeypatch):
    monkeypatch.setattr(landing, "MAX_PART_SECONDS", 0.2)
    transfer_id = await rig.part()
    await rig.works("digest")
    aborted = await rig.peer.received("aborted", transfer_id)
    assert "deadline" in aborted.error.message
    assert rig.count(SlotState.QUARANTINED) == 1
    await rig.turn()
    assert transfer_id not in rig.decode.engine.aborted
    rig.copier.end_next("digest")
    await until(lambda: transfer_id in rig.decode.engine.aborted, "its blocks are free")


async def test_an_exception_between_two_works_is_reported_after_the_first(rig, monkeypatch):
    """The slot may be granted again then: what was enqueued must have read it."""
    scatter = rig.copier.scatter

    def half(data: torch.Tensor, region: CacheRegion, after: object) -> None:
        scatter(data, region, after)  # type: ignore[arg-type]
        raise RuntimeError("no memory on the device")

    monkeypatch.setattr(rig.copier, "scatter", half)
    transfer_id = await rig.part()
    await rig.works("digest")
    rig.copier.end_next("digest")
    await rig.works("scatter")
    await rig.turn()
    assert rig.count(SlotState.GRANTED) == 1 and not rig.peer.all("aborted", transfer_id)
    rig.copier.end_marks()
    rig.copier.end_next("scatter")
    assert "failed" in (await rig.peer.received("aborted", transfer_id)).error.message


async def test_parts_for_which_the_device_has_no_room_wait_in_their_slots(rig):
    rig.copier.works_at_once = 1
    for _ in range(3):
        await rig.part()
    rig.copier.end_marks()
    for _ in range(6):
        await until(lambda: len(rig.copier.waiting) == 1, "one at a time", 15)
        rig.copier.waiting[0].end()
    await rig.peer.received("part_result", count=3)
    await until(lambda: rig.decode.all_free, "every slot free")


async def test_a_fenced_worker_scatters_nothing_of_its_earlier_epoch(rig):
    transfer_id = await rig.part()
    await rig.works("digest")
    worker = common_pb2.WorkerRef(worker_id="decode", epoch=77)
    rejoining = asyncio.create_task(rig.decode.receiver.rejoin(worker))
    await until(lambda: rig.count(SlotState.QUARANTINED) == 1, "in doubt")
    assert transfer_id not in rig.decode.engine.aborted
    rig.copier.end_marks()
    rig.copier.end_next("digest")
    await rejoining
    assert transfer_id in rig.decode.engine.aborted
    assert rig.copier.names == [] and not rig.cache.any()


def test_a_settling_waits_for_the_parts_that_had_arrived_before_it():
    settling = Settling()
    settling.add(b"first", arrived=3)
    settling.add(b"second", arrived=3)
    for _ in range(SETTLE_POLLS):
        settling.polled()
    late = float("inf")
    assert settling.take(late, ended=2) is None
    assert settling.take(late, ended=3) == b"first"
    assert settling.take(late, ended=9) == b"second"
    assert not settling
