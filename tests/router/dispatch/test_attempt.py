"""The real attempt against scripted workers, over real calls and links."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from cluster.errors import BatonError, DrainingError, PeerLostError, StaleEpochError
from cluster.protocol.link import WINDOW_TOKENS
from router.dispatch import attempt as attempts
from router.dispatch.arbiter import CONTROL_SECONDS
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Ended, Source
from router.link import links as all_links
from tests.harness.waiting import until
from tests.router.dispatch.attempt_world import World, any_end, both, ends
from tests.router.dispatch.scripted_workers import FIRST, HANG, TRANSFER, done, token
from wire import decode_pb2

P, D = Source.PREFILL, Source.DECODE
LONG = 60.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    async with asyncio.timeout(LONG):
        for attempt in made.made:
            await attempt.close()
        await made.stop()


async def events(attempt: Attempt, enough: Callable[[list[Any]], bool]) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(LONG):
        while not enough(found):
            found += await attempt.events.take()
    return found


async def test_each_worker_gets_its_part(world):
    world.prefill.sends, world.decode.sends = [token(9), done()], [token(9), token(10), done()]
    attempt = world.attempt()
    attempt.start()
    await events(attempt, both)
    (run,) = world.prefill.asked
    assert not world.decode.asked, "the prefill worker's Reserve opens it there"
    assert (run.transfer_id, run.worker_epoch, run.admission_deadline_ms) == (TRANSFER, 3, 2500)
    assert (run.decode.worker_id, run.decode.epoch, run.decode.address) == ("d", 4, world.decode.address)
    assert run.handle.incarnation == run.decode_handle.incarnation
    assert run.handle.number != run.decode_handle.number
    assert sorted(attempt.tokens, key=str) == [(D, 10), (D, 9), (P, 9)]
    assert sorted(attempt.taken) == [9, 9, 10]
    assert attempt.finished == attempt.responded == {P, D} and not attempt.failed
    assert attempt.has_ended


async def test_a_local_attempt_asks_the_decode_worker_alone(world):
    world.decode.sends = [token(9), done()]
    attempt = world.attempt(local=True)
    attempt.admission_seconds = 4e-4
    attempt.start()
    await events(attempt, any_end)
    (run,) = world.decode.asked
    assert isinstance(run, decode_pb2.DecodeRunRequest) and run.worker_epoch == 4
    assert run.admission_deadline_ms == 1, "to workers, 0 is a time of their own"
    assert attempt.has_ended and attempt.is_local
    await attempt.close()
    assert not world.prefill.asked and not world.decode.link.cancelled


@pytest.mark.parametrize("going_on", [{P}, {D}, {P, D}, set()])
async def test_only_workers_that_still_run_are_cancelled(world, going_on):
    for source, worker in ((P, world.prefill), (D, world.decode)):
        worker.sends = [token(9)] if source in going_on else [token(9), done()]
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {P, D} and attempt.finished == {P, D} - going_on, "all is sent")
    assert attempt.has_ended == (not going_on)
    await asyncio.wait_for(attempt.close(), LONG)
    assert world.prefill.link.cancelled == [TRANSFER] * (P in going_on)
    assert world.decode.link.cancelled == [TRANSFER] * (D in going_on)
    assert not world.prefill.called_to_cancel and not world.decode.called_to_cancel, "over the link"


@pytest.mark.parametrize("going_on", [{P, D}, set()])
async def test_nothing_is_left_of_an_attempt_that_is_over(world, going_on):
    for source, worker in ((P, world.prefill), (D, world.decode)):
        worker.sends = [token(9)] if source in going_on else [token(9), done()]
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {P, D} and attempt.finished == {P, D} - going_on, "all is sent")
    gc.disable()
    try:
        if going_on:
            await asyncio.wait_for(attempt.close(), LONG)
        left = weakref.ref(world.made.pop())
        attempt = None
        world.when_drained.clear()
        await until(lambda: left() is None, "it is freed", 10)
    finally:
        gc.enable()


async def test_a_cancel_without_a_link_is_a_call(world):
    world.decode.sends = [token(9)]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    await world.decode.link.stop()
    await until(lambda: world.links.up() == 0, "the link is down")
    await asyncio.wait_for(attempt.close(), LONG)
    assert world.decode.called_to_cancel == [TRANSFER]


@pytest.fixture
def unreached(world, monkeypatch) -> list[str]:
    """Workers to which a call failed on the way."""
    names: list[str] = []
    monkeypatch.setattr(world.links, "not_reached", names.append)
    return names


async def test_a_refusal_keeps_its_class_and_is_no_sign_of_a_lost_worker(world, unreached):
    world.prefill.run = DrainingError("leaves")
    attempt = world.attempt()
    attempt.start()
    found = ends(await events(attempt, any_end))
    assert isinstance(found[P].error, DrainingError)
    assert attempt.failed == {P} and not attempt.responded
    assert not unreached, "it has answered"


async def test_a_worker_whose_call_broke_was_not_reached(world, unreached):
    world.prefill.run = grpc.StatusCode.UNAVAILABLE
    attempt = world.attempt()
    attempt.start()
    found = ends(await events(attempt, any_end))
    assert isinstance(found[P].error, BatonError)
    assert unreached == [world.prefill.name]


@pytest.mark.parametrize("run", [None, DrainingError("leaves")])
async def test_a_worker_that_answers_its_call_was_reached(world, monkeypatch, run):
    names: list[str] = []
    monkeypatch.setattr(world.links, "reached", names.append)
    world.prefill.run = run
    attempt = world.attempt()
    attempt.start()
    await until(lambda: names == [world.prefill.name], "its call is answered")


async def test_a_worker_that_does_not_answer_its_call_is_lost_and_not_late(world, monkeypatch):
    """A deadline of the client's would be reported as an overload, with another status."""
    monkeypatch.setattr(attempts, "LOST_SECONDS", 0.5)
    world.prefill.run = HANG
    attempt = world.attempt()
    attempt.start()
    error = ends(await events(attempt, lambda found: P in ends(found)))[P].error
    assert isinstance(error, PeerLostError) and "no message received" in str(error)


async def test_a_run_whose_connection_broke_is_repeated_while_the_link_holds(world, unreached):
    """The worker may have it or not: it takes a transfer id in once (rule 3 of the link)."""
    runs, run = [], world.channels.prefill(world.prefill.address).Run

    async def breaks_twice(request: Any, timeout: float) -> Any:
        runs.append(request.transfer_id)
        answer = await run(request, timeout=timeout) if len(runs) == 2 else None
        if len(runs) < 3:
            none = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "broke", "")
        return answer

    world.prefill.sends = [token(9), done()]
    world.channels.prefill(world.prefill.address).Run = breaks_twice
    attempt = world.attempt()
    attempt.start()
    found = ends(await events(attempt, any_end))
    assert found[P].end is not None and not attempt.failed and not unreached
    assert runs[:2] == [TRANSFER] * 2 and len(world.prefill.asked) == 1


async def test_a_run_is_not_repeated_once_the_link_is_lost(world, unreached):
    attempt = world.attempt()
    await world.prefill.server.stop(0)
    await world.prefill.link.stop()
    attempt.start()
    found = ends(await events(attempt, any_end))
    assert isinstance(found[P].error, PeerLostError) and attempt.failed == {P}
    assert not world.prefill.asked


async def test_a_call_whose_answer_is_lost_changes_nothing_once_tokens_came(world):
    world.decode.sends = [token(9)]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    await world.channels.close()
    world.decode.send(token(10))
    world.decode.send(done())
    found = await events(attempt, any_end)
    assert ends(found)[D].end is not None and not attempt.failed


async def test_a_silent_worker_is_lost(world, monkeypatch):
    monkeypatch.setattr(all_links, "LOST_SECONDS", 1.2)
    world.prefill.sends, world.decode.sends = [token(9)], [token(9), done()]
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {P, D}, "both have sent something")
    world.prefill.link.hangs = True
    found = ends(await events(attempt, both))
    assert isinstance(found[P].error, PeerLostError) and "no message received" in str(found[P].error)
    assert found[D].end is not None
    assert world.prefill.name in world.links.suspects


async def test_an_unread_attempt_is_bounded_by_its_credit_and_not_lost(world, monkeypatch):
    monkeypatch.setattr(all_links, "LOST_SECONDS", 1.2)
    world.decode.sends = [*(token(FIRST + i) for i in range(WINDOW_TOKENS + 50)), done()]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: len(attempt.taken) == WINDOW_TOKENS, "the window")
    await asyncio.sleep(1.5)  # longer than a silent worker has
    assert len(attempt.taken) == WINDOW_TOKENS and not attempt.failed
    attempt.choices[0].next_position = FIRST + 100
    attempt.grant()
    await events(attempt, any_end)
    assert attempt.taken == list(range(FIRST, FIRST + WINDOW_TOKENS + 50))


async def test_credit_is_granted_in_quarters_of_the_window(world):
    world.decode.sends = [token(FIRST + i) for i in range(200)]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: len(attempt.taken) == 200, "they came")
    assert world.when_drained == [attempt.grant], "it is asked for once, until it is granted"
    world.decode.link.credited.clear()
    for taken, limit in ((63, 0), (64, 64), (100, 64), (128, 128)):
        attempt.choices[0].next_position = FIRST + taken
        attempt.grant()
        assert attempt.limits(D) == [FIRST + limit + WINDOW_TOKENS]
    assert world.decode.log is not None
    await until(lambda: world.decode.log.choices[0].first == FIRST + 128, "read tokens are dropped")


async def test_a_worker_that_sends_beyond_its_limit_is_read_no_more(world):
    """What a client has not read is bounded by the limits alone."""
    attempt = world.attempt(local=True)
    attempt.received(D, token(FIRST + WINDOW_TOKENS - 1))
    attempt.received(D, token(FIRST + WINDOW_TOKENS))
    attempt.received(D, token(FIRST))
    attempt.received(D, token(FIRST + WINDOW_TOKENS + 1))  # of the frame that is being read
    (broken,) = await attempt.events.take()
    assert isinstance(broken, Broken) and isinstance(broken.error, PeerLostError)
    assert f"position {FIRST + WINDOW_TOKENS} of choice 0" in str(broken.error)
    assert attempt.taken == [FIRST + WINDOW_TOKENS - 1]


async def test_a_token_of_another_choice_breaks_the_attempt(world):
    attempt = world.attempt(local=True)
    other = token(FIRST)
    other.choice = 1
    attempt.received(D, other)
    assert isinstance((await attempt.events.take())[0], Broken) and not attempt.taken


# --- an attempt that ends with its first token ---------------------------------------------------------------------


@pytest.mark.parametrize(("new", "held"), [(1, 0), (3, 2)])
async def test_no_decode_worker_is_asked_or_waited_for(world, new, held):
    world.prefill.sends = [token(FIRST)]
    attempt = world.attempt(new=new, held=held)
    attempt.start()
    await until(lambda: P in attempt.responded, "the first token")
    assert not attempt.has_ended, "the prefill worker has not sent its end"
    world.prefill.send(done())
    await until(lambda: attempt.has_ended, "ended")
    assert [type(event) for event in await attempt.events.take()] == [Ended]
    assert attempt.taken == [FIRST]
    assert attempt.finished == {P, D} and not attempt.failed
    assert world.decode.log is None


async def test_a_cancel_goes_to_the_prefill_worker_only(world):
    world.prefill.sends = [token(FIRST)]
    attempt = world.attempt(new=1)
    attempt.start()
    await until(lambda: P in attempt.responded, "the first token")
    await attempt.close()
    assert (world.prefill.link.cancelled, world.decode.link.cancelled) == ([TRANSFER], [])


# --- the arbiter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "committed"),
    [(decode_pb2.ATTEMPT_STATE_COMMITTED, True), (decode_pb2.ATTEMPT_STATE_ABORTED, False)],
)
async def test_the_decode_worker_says_whether_it_has_committed(world, state, committed):
    world.decode.arbiter = state
    attempt = world.attempt()
    assert await attempt.abort_unless_committed() is committed
    (asked,) = world.decode.asked
    assert (asked.transfer_id, asked.worker_epoch) == (TRANSFER, 4)


async def test_an_error_answer_of_the_arbiter_is_raised(world):
    world.decode.arbiter = StaleEpochError("another life")
    with pytest.raises(StaleEpochError):
        await world.attempt().abort_unless_committed()


async def test_the_arbiters_silence_is_not_waited_for_twice(world):
    """If the worker is found lost during the question, its answer time is not waited for in addition."""
    world.decode.sends, world.decode.arbiter = [token(9)], HANG
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    asking = asyncio.create_task(attempt.abort_unless_committed())
    await until(lambda: len(world.decode.asked) == 1, "it is asked")
    began = asyncio.get_running_loop().time()
    attempt.lost(D, PeerLostError("gone"))
    with pytest.raises(PeerLostError, match="while it was asked"):
        await asyncio.wait_for(asking, LONG)
    assert asyncio.get_running_loop().time() - began < CONTROL_SECONDS


async def test_a_lost_prefill_worker_does_not_end_the_question(world):
    world.decode.arbiter = decode_pb2.ATTEMPT_STATE_COMMITTED
    attempt = world.attempt()
    attempt.lost(P, PeerLostError("gone"))
    assert await attempt.abort_unless_committed() is True


async def test_a_committed_attempt_that_its_decode_worker_has_forgotten_since_is_lost(world):
    """No end of the prefill worker says that the decode worker had it: the arbiter has."""
    world.decode.arbiter = decode_pb2.ATTEMPT_STATE_COMMITTED
    attempt = world.attempt()
    attempt.start()
    await until(lambda: world.decode.log is not None and world.links.up() == 2, "both have it")
    await until(lambda: not attempt._handles[D].asked_early, "what it was asked is answered")
    attempt.lost(P, PeerLostError("gone"))
    assert await attempt.abort_unless_committed()
    world.decode.link.forget(TRANSFER)
    for link in world.links._links.values():
        link.ask(-1.0)
    await until(lambda: D in attempt.failed, "it is lost", 10.0)
    assert "no such attempt" in str(ends(await attempt.events.take())[D].error)


async def test_the_arbiter_is_asked_by_a_call_of_its_own(world):
    """Also while no link is up (rule 9 of the link)."""
    attempt = world.attempt()
    attempt.start()
    await until(lambda: world.links.up() == 2, "both links are up")

    async def cut(seconds: float) -> Any:
        raise ConnectionResetError

    for link in world.links._links.values():
        link._opener._reach = cut
        link._connection.abort()
    await until(lambda: world.links.up() == 0, "no link is up")
    assert not await asyncio.wait_for(attempt.abort_unless_committed(), LONG)
    assert [key for key in world.channels._open if key[1]] == [(world.decode.address, True)]


async def test_a_cancel_without_an_answer_is_a_call_after_a_third_of_a_second(world, monkeypatch):
    world.decode.sends = [token(9)]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    free = asyncio.Event()

    async def waits(transfer_id: bytes) -> None:
        await free.wait()

    monkeypatch.setattr(world.decode.link.routers, "_cancel", waits)
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(attempt.close(), LONG)
    assert world.decode.called_to_cancel == [TRANSFER]
    assert attempts.IN_BAND_SECONDS == 0.3 <= asyncio.get_running_loop().time() - began
    free.set()
