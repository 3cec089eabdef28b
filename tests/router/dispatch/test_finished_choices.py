"""A stop string ends one of several choices: the worker, where stop strings are not known, goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.link import WINDOW_TOKENS
from router.dispatch.attempt import Attempt, Source
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
    """An attempt at two choices and the worker's log of it; `deliver` is what the link does."""

    def __init__(self) -> None:
        completion = Completion(
            "r", "m", [1] * PROMPT, common_pb2.SamplingParams(max_tokens=TOKENS), n=2, stop=("STOP",)
        )
        text: Any = SimpleNamespace(detokenizer=lambda prompt: Detokenizer())
        self.choices = [ChoiceStream(i, completion, text) for i in range(2)]
        spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * PROMPT), n=2)
        self.log = AttemptLog.of(spec, lambda: None)
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
        for choice in (0, 1):
            stops = choice == 0 and number == STOPS_AT
            self.log.add(choice, PROMPT + number, STOP if stops else 5)
        self.deliver()
        calls, self.when_drained[:] = list(self.when_drained), []
        for call in calls:  # the client has read everything
            call()

    def deliver(self) -> None:
        for choice in self.log.choices:
            while choice.sent < min(choice.end, choice.limit):
                token_id = choice.tokens[choice.sent - choice.first]
                token = common_pb2.Token(choice=choice.choice, position=choice.sent, token_id=token_id)
                self.attempt.came(Source.DECODE, token)
                choice.sent += 1


async def test_the_others_go_on_beyond_the_window() -> None:
    streams = Streams()
    for number in range(TOKENS):
        streams.step(number)
    stopped, other = streams.choices
    assert (stopped.finish, stopped.new_tokens) == ("stop", STOPS_AT + 1)
    assert other.finish is None and other.new_tokens == TOKENS


@pytest.mark.parametrize("steps", [STOPS_AT + 5, WINDOW_TOKENS, 2 * WINDOW_TOKENS])
async def test_a_link_that_breaks_afterwards_attaches_again(steps: int) -> None:
    streams = Streams()
    for number in range(steps):
        streams.step(number)
    assert streams.log.resume(streams.attempt.positions(), streams.attempt.limits()), "it is kept"
    for number in range(steps, steps + WINDOW_TOKENS):
        streams.step(number)
    assert streams.choices[1].new_tokens == steps + WINDOW_TOKENS
