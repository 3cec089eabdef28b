"""The real attempt against scripted workers over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from cluster.errors import BatonError, DrainingError, PeerLostError, StaleEpochError
from cluster.rpc import errors
from router.dispatch import attempt as attempts
from router.dispatch import liveness
from router.dispatch.attempt import Attempt, Ended, Source, TokenCame
from router.dispatch.channels import Channels
from router.dispatch.liveness import Liveness
from router.placement.types import Placed
from tests.harness.waiting import until
from wire import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

P, D = Source.PREFILL, Source.DECODE
TRANSFER = bytes(range(16))
LONG = 60.0


def token(position: int) -> common_pb2.AttemptEvent:
    return common_pb2.AttemptEvent(token=common_pb2.Token(position=position, token_id=7))


def done() -> common_pb2.AttemptEvent:
    return common_pb2.AttemptEvent(end=common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE))


class HANG:
    """The stream stays open without further events."""


@dataclass
class Worker:
    """Both services; its streams send `says` in order: an event, an error, or HANG."""

    says: list[Any] = field(default_factory=list)
    arbiter: Any = decode_pb2.ATTEMPT_STATE_ABORTED
    asked: list[Any] = field(default_factory=list)
    cancelled: list[bytes] = field(default_factory=list)
    said: int = 0
    address: str = ""
    server: Any = None

    async def start(self) -> None:
        self.server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)  # type: ignore[arg-type]
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server)  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()

    async def _stream(self, request: Any, context: Any) -> AsyncIterator[common_pb2.AttemptEvent]:
        self.asked.append(request)
        for one in self.says:
            if one is HANG:
                await asyncio.Event().wait()
            if isinstance(one, BatonError):
                await errors.abort(context, one)
            if isinstance(one, grpc.StatusCode):
                await context.abort(one, "broke")
            yield one
            self.said += 1

    Run = Attach = _stream

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request.transfer_id)
        kind = prefill_pb2 if isinstance(request, prefill_pb2.PrefillCancelRequest) else decode_pb2
        name = "PrefillCancelResponse" if kind is prefill_pb2 else "DecodeCancelResponse"
        return getattr(kind, name)(known=True)

    async def Abort(self, request: Any, context: Any) -> Any:
        self.asked.append(request)
        if self.arbiter is HANG:
            await asyncio.Event().wait()
        if isinstance(self.arbiter, BatonError):
            await errors.abort(context, self.arbiter)
        return decode_pb2.AbortResponse(state=self.arbiter)

    def __getattr__(self, name: str) -> Any:
        if name in ("PeerExited", "Handoff"):  # of the service, never called here
            return None
        raise AttributeError(name)


class Heard(Liveness):
    """Records which workers could not be reached."""

    def __init__(self) -> None:
        super().__init__()
        self.unreached: list[str] = []

    def not_reached(self, name: str) -> None:
        self.unreached.append(name)
        super().not_reached(name)


@dataclass
class World:
    prefill: Worker = field(default_factory=Worker)
    decode: Worker = field(default_factory=Worker)
    liveness: Heard = field(default_factory=Heard)
    channels: Channels = field(default_factory=Channels)
    made: list[Attempt] = field(default_factory=list)

    def attempt(self, *, local: bool = False) -> Attempt:
        p, d = (
            SimpleNamespace(worker_id=name, name=f"{name}@{epoch}", address=one.address, epoch=epoch)
            for name, epoch, one in (("p", 3, self.prefill), ("d", 4, self.decode))
        )
        placed = Placed(None if local else p, d, 0, 0, False)  # type: ignore[arg-type]
        made = Attempt(
            request_id="r",
            spec=common_pb2.GenerateSpec(model_id="m", sampling=common_pb2.SamplingParams(max_tokens=100)),
            placed=placed,
            channels=self.channels,
            liveness=self.liveness,
            admission_seconds=2.5,
            from_position=9,
            transfer_id=TRANSFER,
        )
        self.made.append(made)
        return made


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    for one in (made.prefill, made.decode):
        await one.start()
    yield made
    async with asyncio.timeout(LONG):
        for attempt in made.made:
            await attempt.close()
        await made.channels.close()
        for one in (made.prefill, made.decode):
            await one.server.stop(0)


async def events(attempt: Attempt, enough: Callable[[list[Any]], bool]) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(LONG):
        while not enough(found):
            found += await attempt.events.take()
    return found


def ends(found: list[Any]) -> dict[Source, Ended]:
    return {event.source: event for event in found if isinstance(event, Ended)}


def both(found: list[Any]) -> bool:
    return len(ends(found)) == 2


async def test_each_worker_is_asked_for_its_part(world):
    world.prefill.says, world.decode.says = [token(9), done()], [token(9), token(10), done()]
    attempt = world.attempt()
    attempt.start()
    found = await events(attempt, both)
    (run,), (attach,) = world.prefill.asked, world.decode.asked
    assert (run.transfer_id, run.worker_epoch, run.admission_deadline_ms) == (TRANSFER, 3, 2500)
    assert (run.decode.worker_id, run.decode.epoch, run.decode.address) == ("d", 4, world.decode.address)
    assert (attach.transfer_id, attach.worker_epoch, attach.from_position) == (TRANSFER, 4, 9)
    assert attach.admission_deadline_ms == 2500
    came = [(e.source, e.token.position) for e in found if isinstance(e, TokenCame)]
    assert sorted(came, key=str) == [(D, 10), (D, 9), (P, 9)]
    assert attempt.finished == attempt.responded == {P, D} and not attempt.failed
    assert attempt.has_ended


async def test_a_local_attempt_asks_the_decode_worker_alone(world):
    world.decode.says = [token(9), done()]
    attempt = world.attempt(local=True)
    attempt.start()
    await events(attempt, lambda found: bool(ends(found)))
    (run,) = world.decode.asked
    assert isinstance(run, decode_pb2.DecodeRunRequest) and run.worker_epoch == 4
    assert attempt.has_ended and attempt.is_local
    await attempt.close()
    assert not world.prefill.asked and not world.prefill.cancelled and not world.decode.cancelled


@pytest.mark.parametrize("going_on", [{P}, {D}, {P, D}, set()])
async def test_only_workers_that_still_run_are_cancelled(world, going_on):
    for source, worker in ((P, world.prefill), (D, world.decode)):
        worker.says = [token(9), HANG if source in going_on else done()]
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {P, D} and attempt.finished == {P, D} - going_on, "all is said")
    assert attempt.has_ended == (not going_on)
    await asyncio.wait_for(attempt.close(), LONG)
    assert world.prefill.cancelled == [TRANSFER] * (P in going_on)
    assert world.decode.cancelled == [TRANSFER] * (D in going_on)
    assert all(task.done() for task in attempt._tasks)


async def test_a_local_attempt_that_goes_on_is_cancelled_at_the_decode_worker(world):
    world.decode.says = [token(9), HANG]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    await asyncio.wait_for(attempt.close(), LONG)
    assert (world.decode.cancelled, world.prefill.cancelled) == ([TRANSFER], [])


@pytest.mark.parametrize("says", [[], [token(9)]], ids=["at once", "after a token"])
async def test_a_stream_that_ends_without_an_end_is_lost(world, says):
    world.prefill.says, world.decode.says = says, [HANG]
    attempt = world.attempt()
    attempt.start()
    found = await events(attempt, lambda found: bool(ends(found)))
    assert isinstance(ends(found)[P].error, PeerLostError) and ends(found)[P].end is None
    assert attempt.failed == {P} and attempt.responded == ({P} if says else set())


async def test_a_refusal_keeps_its_class_and_is_no_sign_of_a_lost_worker(world):
    world.prefill.says, world.decode.says = [DrainingError("leaves")], [StaleEpochError("other")]
    world.liveness._lost.failed("p@3")  # it was lost a moment ago: one that is not reached again stays out
    attempt = world.attempt()
    attempt.start()
    found = ends(await events(attempt, both))
    assert isinstance(found[P].error, DrainingError) and isinstance(found[D].error, StaleEpochError)
    assert attempt.failed == {P, D} and not attempt.responded
    assert not world.liveness.unreached, "it has answered"


@pytest.mark.parametrize("heard", [True, False])
async def test_a_worker_that_spoke_before_it_broke_was_reached(world, heard):
    world.prefill.says = [token(9), grpc.StatusCode.UNAVAILABLE][0 if heard else 1 :]
    world.decode.says = [HANG]
    attempt = world.attempt()
    attempt.start()
    found = await events(attempt, lambda found: bool(ends(found)))
    assert isinstance(ends(found)[P].error, BatonError)
    assert attempt.failed == {P} and attempt.responded == ({P} if heard else set())
    assert world.liveness.unreached == ([] if heard else ["p@3"])


async def test_a_worker_that_is_not_there_was_not_reached(world):
    world.decode.says = [HANG]
    await world.prefill.server.stop(0)
    attempt = world.attempt()
    attempt.start()
    await events(attempt, lambda found: bool(ends(found)))
    assert world.liveness.unreached == ["p@3"]
    world.prefill.server = grpc.aio.server()  # the fixture stops it


async def test_a_silent_worker_is_lost(world, monkeypatch):
    monkeypatch.setattr(liveness, "LOST_SECONDS", 0.3)
    world.prefill.says, world.decode.says = [token(9), HANG], [token(9), done()]
    attempt = world.attempt()
    attempt.start()
    found = ends(await events(attempt, both))
    error = found[P].error
    assert isinstance(error, PeerLostError) and "no message received" in error.message
    assert found[D].end is not None
    assert "p@3" in world.liveness.suspects


async def test_an_unread_stream_is_paused_and_not_lost(world, monkeypatch):
    monkeypatch.setattr(attempts, "MAX_EVENTS", 4)
    monkeypatch.setattr(liveness, "LOST_SECONDS", 0.3)
    world.decode.says = [*(token(9 + i) for i in range(50)), done()]
    attempt = world.attempt(local=True)
    attempt.start()
    await until(lambda: attempt.events.full, "full")
    (watch,) = world.liveness._workers["d@4"].watches
    await until(lambda: watch.paused, "it waits for room")
    loop = asyncio.get_running_loop()
    since = loop.time()
    await until(lambda: loop.time() > since + 0.6, "longer than a silent worker has")
    assert len(attempt.events._items) == 4 and not attempt.failed
    found = await events(attempt, lambda found: bool(ends(found)))
    assert [e.token.position for e in found if isinstance(e, TokenCame)] == list(range(9, 59))


# --- the arbiter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "committed"),
    [(decode_pb2.ATTEMPT_STATE_COMMITTED, True), (decode_pb2.ATTEMPT_STATE_ABORTED, False)],
)
async def test_the_decode_worker_reports_whether_it_has_committed(world, state, committed):
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
    world.prefill.says, world.decode.says, world.decode.arbiter = [HANG], [token(9), HANG], HANG
    attempt = world.attempt()
    attempt.start()
    await until(lambda: attempt.responded == {D}, "it runs")
    asking = asyncio.create_task(attempt.abort_unless_committed())
    await until(lambda: len(world.decode.asked) == 2, "it is asked")
    began = asyncio.get_running_loop().time()
    attempt._lost(D, PeerLostError("gone"))
    with pytest.raises(PeerLostError, match="while it was asked"):
        await asyncio.wait_for(asking, LONG)
    assert asyncio.get_running_loop().time() - began < attempts.CONTROL_SECONDS


async def test_a_lost_prefill_worker_does_not_end_the_question(world):
    world.decode.arbiter = decode_pb2.ATTEMPT_STATE_COMMITTED
    attempt = world.attempt()
    attempt._lost(P, PeerLostError("gone"))
    assert await attempt.abort_unless_committed() is True
