"""A prefill worker killed in the middle of a hand-off: its slots stay in doubt until its parent reports
that it has exited, no other peer is affected, and the ring stays consistent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.errors import UnavailableError
from kv_transfer.decode_side import landing
from kv_transfer.decode_side.ring import SlotState
from tests.harness.waiting import until
from tests.kv_transfer.pair import (
    PREFILL_EPOCH,
    SLOT_BYTES,
    TRANSPORTS,
    Decode,
    assert_same,
    before_verify,
    config,
    decode_side,
    prefill_side,
)

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 200
SLOTS = 16  # of the ring: a quarter of them is one hand-off's share
DOOMED = f"doomed@{PREFILL_EPOCH:x}"


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return request.param


@asynccontextmanager
async def killed_midway(decode: Decode, transport: str):
    """Yields once the sender is dead, reaped, and its hand-off aborted: some of its slots are in doubt."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(data: object) -> None:
        inside.set()
        go_on.wait(20)

    before_verify(decode.ranks[0], wait)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kv_transfer.sending_process",
        transport,
        decode.ref.address,
        str(TOKENS),
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        await until(inside.is_set, "a part at the rank", 30.0)
        await until(lambda: decode.count(SlotState.GRANTED) == SLOTS // 4, "its whole share granted")
        process.kill()
        await process.wait()
        await until(lambda: decode.count(SlotState.QUARANTINED) == SLOTS // 4, "slots in doubt")
        before_verify(decode.ranks[0], lambda data: None)
        go_on.set()
        await until(lambda: bool(decode.engine.aborted), "the hand-off aborted")
        yield
    finally:
        go_on.set()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_its_slots_are_freed_by_its_parents_word_only(transport):
    async with decode_side(config(transport)) as decode, killed_midway(decode, transport):
        doubtful = decode.count(SlotState.QUARANTINED)
        decode.receiver.check_integrity()
        async with prefill_side(config(transport)) as prefill:  # another peer's work does not free them
            await prefill.send(decode.ref, TOKENS)
            assert_same(prefill, decode, TOKENS)
            await prefill.send(decode.ref, TOKENS)
        assert decode.count(SlotState.QUARANTINED) == doubtful
        await decode.receiver.process_exited("another@1")
        assert decode.count(SlotState.QUARANTINED) == doubtful
        await decode.receiver.process_exited(DOOMED)
        await until(lambda: decode.all_free, "every slot free")


async def test_the_ring_grows_and_peers_write_into_its_new_memory(transport):
    """The peer was there before the new segment: it must get the announcement before a slot in it."""
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        await prefill.send(decode.ref, TOKENS)
        async with killed_midway(decode, transport):
            (ring,) = decode.rings
            await until(lambda: len(ring.slots) > SLOTS, "a further segment")
            for _ in range(3):
                await prefill.send(decode.ref, TOKENS)
                assert_same(prefill, decode, TOKENS)
            assert any(slot.generation for slot in ring.slots[SLOTS:]), "no part went through the new slots"
            await decode.receiver.process_exited(DOOMED)
            await until(lambda: decode.all_free, "every slot free")


async def test_doubt_that_lasts_at_the_cap_ends_the_worker(transport, monkeypatch):
    monkeypatch.setattr(landing, "EXHAUSTED_SECONDS", 0.3)
    capped = config(transport, ring_max_bytes=SLOTS * SLOT_BYTES)
    async with decode_side(capped) as decode:
        reasons = decode.exhausted
        async with killed_midway(decode, transport):
            assert not reasons, "at once: a hand-off that drains as usual must not end the worker"
            await until(lambda: bool(reasons), "the worker gives up")
            assert "in doubt" in reasons[0]
            async with prefill_side(config(transport)) as prefill:
                with pytest.raises(UnavailableError):
                    await prefill.open(decode.ref, TOKENS)


async def test_the_word_may_come_before_the_stream_breaks(transport):
    """Its parent reaps it first: the slots it holds are still granted then."""
    async with decode_side(config(transport)) as decode, prefill_side(config(transport)) as prefill:
        inside, go_on = threading.Event(), threading.Event()

        def wait(data: object) -> None:
            inside.set()
            go_on.wait(20)

        before_verify(decode.ranks[0], wait)
        handoff = await prefill.open(decode.ref, TOKENS)
        await until(inside.is_set, "a part at the rank")
        exited = asyncio.create_task(decode.receiver.process_exited(f"prefill@{PREFILL_EPOCH:x}"))
        await until(lambda: decode.count(SlotState.QUARANTINED) > 0, "slots in doubt")
        go_on.set()
        await exited
        await until(lambda: decode.all_free, "every slot free")
        await handoff.abort("over")
