"""A client that does not read: what a request has unread is bounded over all its attempts (rule 7 of the link)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.dispatch import dispatcher
from router.dispatch.batch_queue import BatchQueue
from router.request.completion import Completion
from tests.harness.waiting import until
from tests.router.dispatch.scripted_attempts import NEW, PROMPT, World
from wire import common_pb2


@pytest.fixture
def world(text, monkeypatch) -> World:
    """The decode worker gives the request back three times: after three tokens, after none, after one."""
    scripts = [(["next"] * count + ["decode preempted"], "aborted") for count in (3, 0, 1)]
    made = World(text, scripts)
    monkeypatch.setattr(dispatcher, "Attempt", made.attempt)
    return made


def asked(world: World) -> dispatcher.RequestDispatcher:
    sampling = common_pb2.SamplingParams(max_tokens=NEW)
    completion = Completion("r", "m", list(range(3, 3 + PROMPT)), sampling, deadline_seconds=60.0)
    return dispatcher.RequestDispatcher(completion, world.services)


async def positions(deltas: BatchQueue[Any]) -> list[int]:
    found: list[int] = []
    while batch := await deltas.take():
        found += [token.position for delta in batch for token in delta.tokens]
    return found


async def test_a_client_that_does_not_read_gets_no_further_attempt(world):
    """A worker under pressure preempts it again and again: each attempt would bring another window."""
    deltas: BatchQueue[Any] = BatchQueue()
    running = asked(world)
    running.start(deltas)
    await until(lambda: running.stats.retries, "its attempt is over")
    await asyncio.sleep(0.3)  # longer than the pause
    assert len(world.attempts) == 1 and len(deltas._items) == 3
    async with asyncio.timeout(10):
        assert await positions(deltas) == list(range(PROMPT, PROMPT + NEW))
    assert len(world.attempts) == 4
    await world.services.finish(5.0)


async def test_the_time_that_its_client_does_not_read_is_not_its_workers(world):
    """Else a worker that is full for a moment would end it: its deadline for admission is over."""
    config = world.services.config
    seconds = {"admission_seconds": 0.2, "ttft_target_seconds_normal": 0.0}
    world.services.config = config.model_copy(update=seconds)
    deltas: BatchQueue[Any] = BatchQueue()
    running = asked(world)
    running.start(deltas)
    await until(lambda: running.stats.retries, "its attempt is over")
    await asyncio.sleep(0.5)  # longer than its admission
    async with asyncio.timeout(10):
        assert await positions(deltas) == list(range(PROMPT, PROMPT + NEW))
    await world.services.finish(5.0)


async def test_a_request_without_a_token_waits_for_no_reader(text, monkeypatch):
    world = World(text, [(["prefill lost"], "aborted")])
    monkeypatch.setattr(dispatcher, "Attempt", world.attempt)
    deltas: BatchQueue[Any] = BatchQueue()
    running = asked(world)
    running.start(deltas)
    await until(lambda: len(world.attempts) == 2, "it is dispatched again")
    async with asyncio.timeout(10):
        assert await positions(deltas) == list(range(PROMPT, PROMPT + NEW))
    await world.services.finish(5.0)
