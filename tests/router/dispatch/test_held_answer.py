"""Answers that wait until the client has the log probabilities of their prompt."""

from __future__ import annotations

from router.dispatch.attempt_events import Source
from router.dispatch.prompt_stream import PromptStream
from tests.router.dispatch.attempt_world import World
from tests.router.dispatch.scripted_workers import FIRST, token


async def test_a_new_link_does_not_repeat_what_waits_for_the_prompt() -> None:
    world = World()
    await world.start()
    attempt = world.attempt(prompt=PromptStream([1] * FIRST, lambda token: None))
    for position in (FIRST, FIRST + 1):
        attempt.received(Source.DECODE, token(position))
    assert attempt.positions(Source.DECODE) == [FIRST + 2] and not attempt.taken
    await attempt.close()
    await world.stop()
