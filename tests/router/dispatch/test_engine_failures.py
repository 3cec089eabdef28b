"""A request that failed in two engines is not dispatched a third time; one whose workers merely died goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import (
    AttemptsExhaustedError,
    BatonError,
    DeadEndError,
    DrainingError,
    EngineBusyError,
    EngineFailedError,
    EngineRequestError,
    GrammarDeadEndError,
    InternalError,
    PeerLostError,
)
from router.dispatch import dispatcher
from router.dispatch.attempt_events import Source
from router.dispatch.batch_queue import BatchQueue
from router.placement.types import Placed, PlacementRequest
from router.request.completion import Completion
from router.text.tokenizer import ModelText
from tests.router.dispatch.failing_attempts import Failing, run
from tests.router.dispatch.scripted_attempts import NEW, PROMPT, Scripted, World, deliver, end, token
from wire import common_pb2

REQUEST = EngineRequestError("non-finite logits")
FAILED = EngineFailedError("the engine failed while it ran this request: IndexError")
BUSY = EngineBusyError("grammar: this worker is too busy", field="grammar", retry_after_seconds=2.0)


@pytest.mark.parametrize("error", [REQUEST, FAILED, BUSY])
@pytest.mark.parametrize("source", list(Source))
async def test_one_failure_is_retried_at_another_worker(text, monkeypatch, error, source):
    world = Failing(text, [(source, error, 0)])
    assert await run(world, monkeypatch) == NEW
    (first, second) = world.excluded
    assert (source.value[0] in first, source.value[0] in second) == (False, True), "not where it failed"


@pytest.mark.parametrize("errors", [(REQUEST, REQUEST), (FAILED, REQUEST), (FAILED, FAILED)])
@pytest.mark.parametrize("sources", [(Source.PREFILL, Source.DECODE), (Source.DECODE, Source.DECODE)])
async def test_two_failures_end_the_request_in_any_case(text, monkeypatch, errors, sources):
    """Tokens sent in between, and workers that were merely lost, do not reset the count."""
    between = (Source.DECODE, PeerLostError("the stream ended early"), 1)
    world = Failing(text, [(sources[0], errors[0], 2), between, (sources[1], errors[1], 2)])
    with pytest.raises(AttemptsExhaustedError, match="failed in 2 engines") as caught:
        await run(world, monkeypatch)
    assert len(world.attempts) == 3, "a third engine has seen it"
    assert not caught.value.retryable
    assert world.released == [one.transfer_id for one in world.attempts]


@pytest.mark.parametrize(("first", "error"), [(BUSY, EngineBusyError), (FAILED, AttemptsExhaustedError)])
async def test_a_request_that_met_busy_engines_may_be_sent_again(text, monkeypatch, first, error):
    """Its client was told that the request itself was wrong. One that may have made an engine fail is not repeated."""
    world = Failing(text, [(Source.DECODE, first, 2), (Source.PREFILL, BUSY, 0)])
    with pytest.raises(error) as caught:
        await run(world, monkeypatch)
    assert len(world.attempts) == 2
    if error is EngineBusyError:
        assert caught.value.retryable and caught.value.retry_after_seconds == 2.0


@pytest.mark.parametrize("tokens", [0, 2])
@pytest.mark.parametrize("source", list(Source))
@pytest.mark.parametrize("kind", [DeadEndError, GrammarDeadEndError])
async def test_a_dead_end_is_not_tried_elsewhere(text, monkeypatch, source, tokens, kind):
    world = Failing(text, [(source, kind("grammar: no token", field="grammar"), tokens)])
    with pytest.raises(kind):
        await run(world, monkeypatch)
    assert len(world.attempts) == 1


@pytest.mark.parametrize(
    "error", [PeerLostError("lost"), DrainingError("leaves"), InternalError("a rank does not answer")]
)
async def test_errors_that_are_no_engine_failure_do_not_count(text, monkeypatch, error):
    world = Failing(text, [(Source.DECODE, error, 1)] * 5)
    assert await run(world, monkeypatch) == NEW


class Together(Failing):
    """Two choices that run by themselves: what an engine does to one, it does to the other."""

    def __init__(self, text: ModelText, error: BatonError, engines: int):
        super().__init__(text, [])
        self.error, self.engines = error, engines
        self.dispatchers = 0
        self.inside: list[Scripted] = []

    async def place(self, request: PlacementRequest) -> Placed:
        """Each engine that failed with it is left out: D comes back as another life."""
        placed = await super().place(request)
        while f"d-{self.dispatchers}" in request.excluded:
            self.dispatchers += 1
        return replace(placed, decode=SimpleNamespace(**{**vars(self.d), "name": f"d-{self.dispatchers}"}))  # type: ignore[arg-type]

    def attempt(self, **facts: object) -> Scripted:
        made = World.attempt(self, **facts)
        whole = facts["spec"].n == 2  # type: ignore[attr-defined]
        if whole:
            made.start = lambda: self.preempt(made)  # type: ignore[method-assign]
        elif self.dispatchers < self.engines:
            made.start = lambda: self.fail_with(made)  # type: ignore[method-assign]
        else:
            made.start = lambda: self.go_on(made, facts["spec"].first_choice)  # type: ignore[attr-defined, method-assign]
        return made

    def fail_with(self, made: Scripted) -> None:
        """Both are in the first engine when it fails."""
        self.inside.append(made)
        if len(self.inside) > 1:
            for one in self.inside if len(self.inside) == 2 else [made]:
                self.fail(one, Source.DECODE, self.error, 0)

    def preempt(self, made: Scripted) -> None:
        for choice in (0, 1):
            first = token(made.from_position)
            first.choice = choice
            made.received(Source.DECODE, first)
        made.ends(Source.DECODE, end("PREEMPTED"))

    def go_on(self, made: Scripted, choice: int) -> None:
        for position in range(made.from_position, PROMPT + NEW):
            one = token(position)
            one.choice = choice
            made.received(Source.DECODE, one)
        for source in Source:
            made.ends(source, end("DONE"))


async def finish(world: World) -> list[int]:
    completion = Completion(
        "r",
        "m",
        list(range(3, 3 + PROMPT)),
        common_pb2.SamplingParams(max_tokens=NEW),
        n=2,
        deadline_seconds=60.0,
    )
    deltas: BatchQueue[Any] = BatchQueue()
    running = dispatcher.RequestDispatcher(completion, world.services)
    running.start(deltas)
    tokens = [0, 0]
    while batch := await deltas.take():
        for delta in batch:
            tokens[delta.choice] += len(delta.tokens)
    return tokens


@pytest.mark.parametrize("error", [REQUEST, FAILED])
async def test_choices_that_one_engine_failed_with_are_one_failure(text, monkeypatch, error):
    world = Together(text, error, engines=1)
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    async with asyncio.timeout(60):
        assert await finish(world) == [NEW, NEW]
    assert len(world.attempts) == 1 + 2 + 2


@pytest.mark.parametrize("error", [REQUEST, FAILED])
async def test_choices_do_not_get_two_engines_each(text, monkeypatch, error):
    world = Together(text, error, engines=9)
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    with pytest.raises(AttemptsExhaustedError, match="failed in 2 engines"):
        async with asyncio.timeout(60):
            await finish(world)
    assert len(world.attempts) <= 1 + 2 + 2


async def test_an_attempt_that_cannot_begin_leaves_no_charge(text, monkeypatch):
    def refuse() -> None:
        raise InternalError("no channel")

    world = World(text, [])
    made = world.attempt

    def unable(**facts: object) -> Scripted:
        attempt = made(**facts)
        attempt.start = refuse  # type: ignore[method-assign]
        return attempt

    monkeypatch.setattr(dispatcher, "Attempt", unable)
    with pytest.raises(InternalError):
        async with asyncio.timeout(60):
            await deliver(world)
    await world.services.finish(5.0)
    assert world.released == [one.transfer_id for one in world.attempts]
    assert all(one.closed for one in world.attempts)


async def test_an_internal_error_is_not_retried_for_ever(text, monkeypatch):
    """A request may be its cause, though no engine reported it."""
    world = Failing(text, 9 * [(Source.DECODE, InternalError("a rank does not answer"), 0)])
    world.services.config = RouterConfig(model=Path("/none"), max_attempts=3)
    with pytest.raises(AttemptsExhaustedError, match="gave up after 3 attempts"):
        await run(world, monkeypatch)
