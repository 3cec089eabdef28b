"""A stop string ends one of several choices: the worker, where stop strings are not known, goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.link import LINK_VERSION, SHARED_WINDOW_VERSION, WINDOW_TOKENS
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Source
from router.dispatch.choice import ChoiceStream
from router.request.completion import Completion
from wire import common_pb2
from worker.attempt_log import AttemptLog

PROMPT, TOKENS, STOPS_AT = 9, 3 * WINDOW_TOKENS, 10
STOP = 99


class Detokenizer:
    def add(self, token_id: int) -> str:
        return "STOP" if token_id == STOP else "a"

    def flush(self) -> str:
        return ""


class Streams:
    """An attempt at several choices, the first of which stops, and the worker's log of it; `deliver` is what the link
    does."""

    def __init__(self, choices: int = 2, version: int = LINK_VERSION) -> None:
        completion = Completion(
            "r", "m", [1] * PROMPT, common_pb2.SamplingParams(max_tokens=TOKENS), n=choices, stop=("STOP",)
        )
        text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
        self.choices = [ChoiceStream(i, completion, text) for i in range(choices)]
        spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT), n=choices)
        self.log = AttemptLog.of(spec, lambda: None)
        if version < SHARED_WINDOW_VERSION:
            self.log.widen()
        nothing: Any = None
        self.when_drained: list[Callable[[], None]] = []
        placed: Any = SimpleNamespace(prefill=None)
        self.attempt = Attempt(
            request_id="r",
            spec=spec,
            placed=placed,
            channels=nothing,
            links=nothing,
            choices=self.choices,
            admission_seconds=1.0,
            take=lambda token, _: self.choices[token.choice].take(token) is not None,
            when_drained=self.when_drained.append,
        )
        handle: Any = SimpleNamespace(credit=self.log.credit)
        self.attempt._handles[Source.DECODE] = handle

    def step(self, number: int) -> None:
        """A step of the engine, which pauses the whole request while the window of a choice is full."""
        assert not self.log.full, f"paused after {number} steps"
        for choice in range(len(self.choices)):
            stops = choice == 0 and number == STOPS_AT
            self.log.add(choice, PROMPT + number, STOP if stops else 5)
        self.deliver()
        self.client_reads()

    def client_reads(self) -> None:
        calls, self.when_drained[:] = list(self.when_drained), []
        for call in calls:
            call()

    def deliver(self) -> None:
        for choice in self.log.choices:
            while choice.sent < min(choice.end, choice.limit):
                token_id = choice.tokens[choice.sent - choice.first]
                token = common_pb2.Token(choice=choice.choice, position=choice.sent, token_id=token_id)
                self.attempt.received(Source.DECODE, token)
                choice.sent += 1


@pytest.mark.parametrize("version", [1, LINK_VERSION])
@pytest.mark.parametrize("choices", [2, 3, 16, 128])
async def test_the_others_go_on_beyond_the_window(choices: int, version: int) -> None:
    streams = Streams(choices, version)
    for number in range(TOKENS):
        streams.step(number)
    stopped, *others = streams.choices
    assert (stopped.finish, stopped.new_tokens) == ("stop", STOPS_AT + 1)
    for other in others:
        assert other.finish is None and other.new_tokens == TOKENS


@pytest.mark.parametrize("choices", [2, 16, 128])
async def test_one_choice_goes_on_where_the_others_have_ended_at_the_worker(choices: int) -> None:
    """Its tokens alone ask for its credit."""
    streams = Streams(choices)
    for position in range(PROMPT, PROMPT + TOKENS):
        assert not streams.log.full, f"paused at {position}"
        streams.log.add(1, position, 5)
        streams.deliver()
        streams.client_reads()
    assert streams.choices[1].new_tokens == TOKENS


@pytest.mark.parametrize("choices", [1, 2, 16])
async def test_a_client_that_does_not_read_holds_the_same_of_many_choices_as_of_one(choices: int) -> None:
    streams = Streams(choices)
    for position in range(PROMPT, PROMPT + WINDOW_TOKENS):
        if streams.log.full:
            break
        for choice in range(choices):
            streams.log.add(choice, position, 5)
        streams.deliver()
    assert streams.log.full and sum(one.new_tokens for one in streams.choices) == WINDOW_TOKENS


@pytest.mark.parametrize("steps", [STOPS_AT + 5, WINDOW_TOKENS, 2 * WINDOW_TOKENS])
async def test_a_link_that_breaks_afterwards_attaches_again(steps: int) -> None:
    streams = Streams()
    for number in range(steps):
        streams.step(number)
    assert streams.log.resume(
        streams.attempt.positions(Source.DECODE), streams.attempt.limits(Source.DECODE)
    ), "it is kept"
    for number in range(steps, steps + WINDOW_TOKENS):
        streams.step(number)
    assert streams.choices[1].new_tokens == steps + WINDOW_TOKENS


async def test_a_worker_of_link_version_1_may_send_a_whole_window_of_each_choice() -> None:
    streams = Streams(2, version=1)
    for position in range(PROMPT, PROMPT + WINDOW_TOKENS):
        for choice in (0, 1):
            streams.log.add(choice, position, 5)
        streams.deliver()
    assert [one.new_tokens for one in streams.choices] == [WINDOW_TOKENS, WINDOW_TOKENS]
