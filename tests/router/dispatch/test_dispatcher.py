"""A request over attempts that fail in every way: whatever messages workers repeat, skip or leave out, the client gets
each position once and in order (rule 6 of the link)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import PeerLostError, UnreadableAnswerError
from router.dispatch import dispatcher
from router.dispatch.batch_queue import BatchQueue
from router.dispatch.unreachable_pairs import UnreachablePairs
from router.request.completion import Completion
from tests.router.dispatch.scripted_attempts import NEW, PROMPT, D, P, Scripted, World, deliver, end, token
from wire import common_pb2

# What may happen in an attempt, before it goes well or is over.
STEPS = st.sampled_from(
    [
        "next",  # D's next token
        "next",
        "next",
        "first",  # P's first token, which D sends, too
        "again",  # D repeats an older one
        "gap",  # D leaves one out
        "prefill done",
        "prefill refused",
        "prefill aborted",
        "prefill lost",
        "decode lost",
        "decode preempted",
        "decode aborted",
        "decode done",  # too early
    ]
)
ARBITER = st.sampled_from(["committed", "aborted", "silent"])
SCRIPTS = st.lists(st.tuples(st.lists(STEPS, max_size=8), ARBITER), max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scripts=SCRIPTS)
def test_every_position_comes_once_and_in_order(text, scripts):
    with pytest.MonkeyPatch.context() as patch:
        world = World(text, scripts)
        patch.setattr(dispatcher, "Attempt", world.attempt)
        patch.setattr("router.dispatch.retry_policy.RETRY_PAUSE_SECONDS", 0.002)
        began = time.monotonic()
        tokens = asyncio.run(asyncio.wait_for(deliver(world), 30))
        assert time.monotonic() - began < 20
    assert [one.position for one in tokens] == list(range(PROMPT, PROMPT + NEW))
    assert [one.token_id for one in tokens] == [token(one.position).token_id for one in tokens]
    assert world.released == [attempt.transfer_id for attempt in world.attempts], "a charge that stays"
    assert all(attempt.closed or attempt.has_ended for attempt in world.attempts), (
        "a worker was not cancelled"
    )


async def test_workers_that_could_not_meet_are_kept_apart_until_they_meet(text, monkeypatch):
    world = World(text, 2 * [(["prefill aborted"], "aborted")])
    world.services.pairs = UnreachablePairs(lambda: 0.0)
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    await deliver(world)
    # Not d, by the request's own memory; not p, by the router's, as d is the only one. They come all the same, and meet.
    assert world.excluded == [set(), {"d", "p"}, {"d", "p"}]
    assert not world.services.pairs.any_unreachable
    await deliver(world)
    assert world.excluded[3:] == [set()]


async def test_a_request_that_ends_at_its_prefill_worker_has_met_no_decode_worker(text, monkeypatch):
    """An embedding put a pair that does not meet back into use."""
    world = World(text, [])
    pairs = world.services.pairs = UnreachablePairs(lambda: 0.0)
    placed: Any = SimpleNamespace(prefill=world.p, decode=world.d)
    pairs.failed(placed, PeerLostError("not reached"))
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    monkeypatch.setattr(
        Scripted, "start", lambda made: (made.received(P, token(PROMPT)), made.ends(P, end("DONE")))
    )
    sampling = common_pb2.SamplingParams(max_tokens=1)
    running = dispatcher.RequestDispatcher(
        Completion("r", "m", list(range(3, 3 + PROMPT)), sampling, deadline_seconds=60.0), world.services
    )
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)
    async with asyncio.timeout(10):
        assert await deltas.take()
    running.stop()
    await world.services.finish(5.0)
    assert pairs.any_unreachable


def asked(world: World, stop: str = "", seconds: float = 60.0) -> dispatcher.RequestDispatcher:
    """A request that is complete at NEW tokens, or at `stop`: by default the text of the first one."""
    prompt = list(range(3, 3 + PROMPT))
    stop = stop or world.services.text.detokenizer(prompt).add(token(PROMPT).token_id)
    assert stop, "it has a text"
    sampling = common_pb2.SamplingParams(max_tokens=NEW)
    completion = Completion("r", "m", prompt, sampling, stop=(stop,), deadline_seconds=seconds)
    return dispatcher.RequestDispatcher(completion, world.services)


async def read(running: dispatcher.RequestDispatcher) -> list[Any]:
    """What the client gets."""
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)
    found: list[Any] = []
    async with asyncio.timeout(10):
        while batch := await deltas.take():
            found += batch
    return found


def closes_when(answered: asyncio.Event) -> Callable[[Scripted], Awaitable[None]]:
    """Cancels are answered, without reports."""

    async def close(made: Scripted) -> None:
        made.closed = True
        await answered.wait()

    return close


@pytest.mark.parametrize("answers", [False, True])
async def test_an_answer_that_a_stop_string_ends_does_not_wait_for_its_workers(text, monkeypatch, answers):
    """They do not look for stop strings: the decode worker goes on until its window is full, and then waits. `answers`: to
    the cancel, and without a report, as workers of an earlier version do."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    monkeypatch.setattr(Scripted, "start", lambda made: made.received(D, token(PROMPT)))
    answered = asyncio.Event()
    monkeypatch.setattr(Scripted, "close", closes_when(answered))
    if answers:
        answered.set()
        monkeypatch.setattr("router.dispatch.reports.REPORT_SECONDS", 60.0)
    running = asked(world)
    (delta,) = await read(running)
    assert delta.finish == "stop" and running.complete
    answered.set()
    await world.services.finish(5.0)
    assert world.attempts[0].closed, "its workers are told"


async def test_an_answer_that_a_stop_string_ends_waits_for_the_report_of_the_prompt(text, monkeypatch):
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    monkeypatch.setattr(Scripted, "start", lambda made: made.received(D, token(PROMPT)))

    async def close(made: Scripted) -> None:
        """The decode worker does not answer its cancel."""
        made.closed = True
        reported = end("CANCELLED")
        reported.report.CopyFrom(common_pb2.WorkReport(cached_tokens=4, computed_prompt_tokens=1))
        made.ends(P, reported)

    monkeypatch.setattr(Scripted, "close", close)
    running = asked(world)
    await read(running)
    assert running.complete and running.outcome.usage.cached_tokens == 4


async def test_an_answer_that_is_whole_at_its_deadline_has_not_failed(text, monkeypatch):
    """It waits for reports alone then: a client that had all of it got an error behind it."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    monkeypatch.setattr("router.dispatch.reports.REPORT_SECONDS", 60.0)
    monkeypatch.setattr(Scripted, "start", lambda made: made.received(D, token(PROMPT)))
    answered = asyncio.Event()
    monkeypatch.setattr(Scripted, "close", closes_when(answered))
    running = asked(world, seconds=0.2)
    await read(running)
    assert running.complete and not running.failure
    answered.set()
    await world.services.finish(5.0)
    assert world.attempts[0].closed and world.released == [world.attempts[0].transfer_id]


async def test_an_answer_that_no_stop_string_ends_waits_for_its_workers(text, monkeypatch):
    """The usage of a request with stop strings could say that nothing was cached: the reports were not waited for."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    reported = end("DONE")
    reported.report.CopyFrom(common_pb2.WorkReport(cached_tokens=4, computed_prompt_tokens=1))

    def start(made: Scripted) -> None:
        for position in range(PROMPT, PROMPT + NEW):
            made.received(D, token(position))
        for seconds, source, said in ((0.01, P, reported), (0.02, D, end("DONE"))):
            asyncio.get_running_loop().call_later(seconds, made.ends, source, said)

    monkeypatch.setattr(Scripted, "start", start)
    running = asked(world, stop="no text has this")
    await read(running)
    assert running.complete and running.outcome.usage.cached_tokens == 4
    await world.services.finish(5.0)
    assert not world.attempts[0].closed, "nothing is left to cancel"


class _Parser:
    """Fails at its third piece, or where a resumed answer is read again."""

    called = unfinished = False

    def __init__(self) -> None:
        self.fed = 0

    def feed(self, pieces: Any) -> Any:
        self.fed += 1
        if self.fed == 3:
            raise AttributeError("a fault of the parser")
        return []

    def end(self) -> Any:
        return []


@pytest.mark.parametrize("resumed", [0, 4])
async def test_a_parser_that_fails_ends_its_request_alone(text, monkeypatch, caplog, resumed):
    """No attempt follows, no worker is blamed, and the link's callback raises nothing."""
    world = World(text, [])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    source: Any = SimpleNamespace(marker_texts={}, parser=_Parser, name="failing")
    prompt = list(range(3, 3 + PROMPT))
    resume = [token(PROMPT + index).token_id for index in range(resumed)]
    sampling = common_pb2.SamplingParams(max_tokens=NEW)
    completion = Completion("r", "m", prompt, sampling, answer_format=source, resume_tokens=resume)
    world.services.tickets.check = lambda *_: True  # type: ignore[method-assign]
    running = dispatcher.RequestDispatcher(completion, world.services)
    deltas: BatchQueue[Any] = BatchQueue()
    running.start(deltas)

    async def drained() -> None:
        while await deltas.take():
            pass

    with pytest.raises(UnreadableAnswerError, match="AttributeError"):
        await asyncio.wait_for(drained(), 10)
    await world.services.finish(5.0)
    assert "a fault of the parser" in caplog.text
    assert len(world.attempts) == (0 if resumed else 1)
    assert all((one.closed or one.has_ended) and one.playing.done() for one in world.attempts)
    assert world.released == [one.transfer_id for one in world.attempts]
