"""Blocks stay allocated until no write reads them, however the request ended and with every digest setting: a part read
after another request has got the blocks would ship that request's KV under this one's hashes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from cluster.errors import PeerLostError
from kv_transfer import messages as m
from prefill_worker import role as role_module
from prefill_worker.attempt import PrefillAttempt, PrefillState
from tests.harness.waiting import until
from tests.prefill_worker.late_reads import PREFILL, World
from wire import handoff_pb2

MINE, STRANGERS = 11, 71  # tokens
A, B = b"a" * 16, b"b" * 16
PARTS = 8  # of the prompt, one block each


@asynccontextmanager
async def world(digests: str = "off"):
    made = World(digests)
    try:
        yield made
    finally:
        await made.close()


async def cancelled(one: World, attempt: PrefillAttempt) -> None:
    await one.role.cancel(attempt)


async def aborted_by_decode(one: World, attempt: PrefillAttempt) -> None:
    error = PeerLostError("no more").to_wire()
    one.reply(attempt, aborted=handoff_pb2.Aborted(transfer_id=attempt.transfer_id, error=error))


async def decode_lost(one: World, attempt: PrefillAttempt) -> None:
    one.link.lost = True
    one.sender._live[attempt.transfer_id].fail(PeerLostError("silent"))
    one.rank.handle(m.Disconnect(one.link.name))


async def fenced(one: World, attempt: PrefillAttempt) -> None:
    await one.role.attempts.cancel_all()
    await one.sender.rejoin(PREFILL)


async def committed(one: World, attempt: PrefillAttempt) -> None:
    """D reports every part as received; a write's handle may still need another poll."""
    await until(lambda: bool(one.link.of("finish")), "finish is said")
    one.reply(attempt, committed=handoff_pb2.Committed(transfer_id=attempt.transfer_id))


ENDS = [cancelled, aborted_by_decode, decode_lost, fenced, committed]


@pytest.mark.parametrize("digests", ["off", "sample", "all"])
@pytest.mark.parametrize("ends", ENDS)
async def test_a_late_read_finds_the_requests_own_kv(ends, digests):
    async with world(digests) as one:
        attempt = one.run(A, [MINE] * 32)
        await one.computed(attempt)
        await one.grant_all(attempt, PARTS)
        await ends(one, attempt)
        await until(lambda: attempt.log.ended, "its end is reported, although a write still reads")
        one.run(B, [STRANGERS] * 44)  # needs more than what was free beside it
        for _ in range(20):
            await one.steps()
            await asyncio.sleep(0.005)
        assert one.engine.stats().blocks_held >= PARTS
        for write in one.endpoint.writes:
            for piece in write.read():
                assert (piece.view(one.runner.kv.dtype) == MINE).all(), "another request's KV was read"
        await until(attempt.freed.is_set, "given back")
        await one.steps()
        assert one.engine.stats().blocks_held == 11, "the first request still holds some"


@pytest.mark.parametrize("ends", [one for one in ENDS if one is not committed])
async def test_a_request_that_ended_is_computed_no_further(ends):
    """Also while its blocks are still read: computing an unwanted prompt would delay the others."""
    async with world() as one:
        attempt = one.run(A, [MINE] * 40)
        one.router.break_off()  # it has no reader: what is unwanted ends with the detach time
        object.__setattr__(one.engine._scheduler._config, "max_batch_tokens", 16)
        await until(lambda: one.engine.has_work, "the engine has it")
        await one.steps()
        await one.grant_all(attempt, 4)
        await ends(one, attempt)
        await until(lambda: not one.engine.has_work, "nothing more to compute", 10.0)
        assert one.engine.stats().blocks_held == 10
        for write in one.endpoint.writes:
            write.state = "done"
        await until(lambda: one.engine.stats().blocks_held == 0, "given back")
        one.engine.check_integrity()


async def test_cancel_waits_for_reads_for_a_moment_only(monkeypatch):
    """Its answer normally means that the blocks are free, but it must not wait for a stopped decode worker."""
    async with world() as one:
        attempt = one.run(A, [MINE] * 32)
        await one.computed(attempt)
        await one.grant_all(attempt, PARTS)
        await one.role.cancel(attempt)
        monkeypatch.setattr(role_module, "FREE_SECONDS", 0.05)
        assert not await one.role.freed(attempt)
        waiting = asyncio.create_task(one.role.freed(attempt, 60.0))
        for write in one.endpoint.writes:
            write.state = "done"
        assert await waiting
        assert one.engine.stats().blocks_held == 0


async def test_an_attempt_that_never_started_releases_everything():
    """Cancelled between its reservation and its first layer: no rank has opened it, so none would report it drained."""
    async with world() as one:
        spec_handoff = one.role._sender.reserve
        made = []

        async def reserve(*arguments):
            handoff = await spec_handoff(*arguments)

            async def start(request_id: str) -> None:
                raise PeerLostError("before any rank has it")

            handoff.start = start
            made.append(handoff)
            return handoff

        one.sender.reserve = reserve
        attempt = one.run(A, [MINE] * 32)
        await until(lambda: attempt.log.ended, "ended")
        await until(lambda: one.sender.live == 0, "no hand-off is left")
        assert one.link.of("drained") == [A]
        assert one.engine.stats().blocks_held == 0
        assert len(made) == 1


async def test_a_worker_that_stops_does_not_wait_for_a_stuck_peer():
    one = World()
    attempt = one.run(A, [MINE] * 32)
    await one.computed(attempt)
    await one.grant_all(attempt, PARTS)
    await one.role.cancel(attempt)
    async with asyncio.timeout(10):
        await one.sender.close()
    await until(lambda: not one.role.prefilling._freeing._tasks, "nothing waits for ever", 5.0)
    assert one.engine.stats().blocks_held == PARTS
    await one.role.attempts.close()


@pytest.mark.parametrize("returned", [False, True])
async def test_a_cancel_before_the_first_step_ends_the_log_too(returned):
    """Otherwise its reader would wait for ever."""
    async with world() as one:
        attempt = one.run(A, [MINE] * 8)
        attempt.returned_to_router = returned
        await one.role.cancel(attempt)
        assert attempt.log.ended
        await until(lambda: bool(one.router.ends), "its router has the end")
        assert not one.router.tokens[1]
        assert one.router.ends[1].error.code == ("DrainingError" if returned else "CancelledError")
        assert sum(one.role.ended.values()) == 1
        assert await one.role.freed(attempt, 0.0)


async def test_waiting_attempts_are_returned_together():
    """One by one, each cancelled attempt would admit the next one, and a leaving worker would start it."""
    async with world() as one:
        begun = [one.run(A, [MINE] * 44), one.run(B, [MINE] * 44)]
        waiting = [one.run(b"c" * 16, [MINE] * 44), one.run(b"d" * 16, [MINE] * 8)]
        await until(
            lambda: all(attempt.machine.state is PrefillState.COMPUTING for attempt in begun), "begun"
        )
        assert all(attempt.machine.state is PrefillState.QUEUED for attempt in waiting)
        await one.role.return_waiting()
        assert all(attempt.log.ended for attempt in waiting)
        assert not any(attempt.log.ended for attempt in begun)
