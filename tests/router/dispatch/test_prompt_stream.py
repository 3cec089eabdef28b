"""Tokens of a prompt come once and in order, whatever attempts repeat, skip or leave out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.protocol.link import prompt_window_of
from router.dispatch.attempt import Attempt
from router.dispatch.attempt_events import Broken, Source
from router.dispatch.prompt_stream import EmbeddingStream, PromptStream
from wire import common_pb2

PROMPT = [5, 6, 7, 8]


class Streams:
    def __init__(self) -> None:
        self.came: list[int] = []
        self.broken: list[str] = []
        self.stream = PromptStream(PROMPT, lambda token: self.came.append(token.position))

    def take(self, position: int, choice: int = 1, token_id: int | None = None) -> bool:
        token_id = PROMPT[position % 4] if token_id is None else token_id
        token = common_pb2.Token(choice=choice, position=position, token_id=token_id)
        return self.stream.takes(token, 1, lambda error: self.broken.append(str(error)))


def test_a_second_attempt_repeats_nothing():
    """The worker of the first was killed behind two tokens."""
    streams = Streams()
    assert all(streams.take(position) for position in (1, 2))
    assert all(streams.take(position) for position in (1, 2, 3))
    assert not streams.take(4, choice=0, token_id=9)  # of the answer
    assert (streams.came, streams.broken) == ([1, 2, 3], [])


@pytest.mark.parametrize(
    "bad",
    [
        {"position": 3},
        {"position": 2, "token_id": 99},
        {"position": 4, "choice": 0},
        {"position": 4},
        {"position": 2**40},
    ],
)
def test_a_gap_fails_the_attempt(bad):
    streams = Streams()
    streams.take(1)
    assert streams.take(**bad) and len(streams.broken) == 1 and streams.came == [1]


def test_nothing_comes_behind_the_prompts_end():
    streams = Streams()
    assert all(streams.take(position) for position in (1, 2, 3, 4))
    assert streams.came == [1, 2, 3] and len(streams.broken) == 1


def embedding(size: int = 8, position: int = 1, choice: int = 1) -> common_pb2.Token:
    return common_pb2.Token(choice=choice, position=position, embedding=bytes(size))


def test_an_embedding_comes_once_over_all_attempts():
    came: list[Any] = []
    broken: list[str] = []
    stream = EmbeddingStream(2, came.append)

    def take(token: common_pb2.Token) -> bool:
        return stream.takes(token, 1, lambda error: broken.append(str(error)))

    assert take(embedding(choice=0)) and take(embedding(size=12)) and take(embedding(position=0))
    assert len(broken) == 3 and not came
    assert take(embedding()) and take(embedding()) and not take(embedding(choice=0))
    assert len(broken) == 3 and len(came) == 1


class PromptAttempt:
    """An attempt that has one choice, the prompt's being 1, and whose client reads when `drained` is called."""

    def __init__(self, tokens: int, seen: int = 1):
        nothing: Any = None
        placed: Any = SimpleNamespace(prefill=None, decode=SimpleNamespace(worker_id="d"))
        self.stream = PromptStream([0] * tokens, lambda token: None)
        self.stream.next_position = seen  # an earlier attempt brought what is before
        self.credits: list[tuple[int, int]] = []
        self.waiting: list[Callable[[], None]] = []
        sampling = common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=20)
        self.attempt = Attempt(
            request_id="r",
            spec=common_pb2.GenerateSpec(prompt_tokens=bytes(4 * tokens), n=1, sampling=sampling),
            placed=placed,
            channels=nothing,
            links=nothing,
            choices=[SimpleNamespace(index=0, next_position=tokens, finish=None)],  # type: ignore[list-item]
            admission_seconds=1.0,
            take=lambda token, _: True,
            when_drained=self.waiting.append,
            prompt=self.stream,
        )
        handle: Any = SimpleNamespace(credit=lambda choice, limit: self.credits.append((choice, limit)))
        self.attempt._handles[Source.DECODE] = handle

    def came(self, first: int, end: int) -> None:
        for position in range(first, end):
            self.attempt.received(Source.DECODE, common_pb2.Token(choice=1, position=position, rank=1))

    def drained(self) -> None:
        calls, self.waiting = self.waiting[:], []
        self.attempt.when_drained = self.waiting.append
        for call in calls:
            call()


@pytest.mark.parametrize("seen", [1, 500])
async def test_a_prompt_has_credit_as_far_as_its_client_has_read(seen):
    """Also where a second attempt repeats what the client has: the worker begins at position 1 all the same."""
    window = prompt_window_of(20)
    made = PromptAttempt(4 * window, seen)
    made.came(1, 1 + window)
    assert made.credits == [] and made.attempt.limits(Source.DECODE)[-1] == 1 + window
    made.drained()
    assert made.credits == [(1, 1 + 2 * window)]
    made.came(1 + window, 1 + 2 * window)
    made.drained()
    assert made.credits[1:] == [(1, 1 + 3 * window)]
    assert made.stream.next_position == max(seen, 1 + 2 * window)


async def test_a_second_attempt_whose_link_breaks_goes_on_where_it_was():
    """Behind what the first one brought its worker has no credit: asked to go on there, it would send nothing more."""
    window = prompt_window_of(20)
    made = PromptAttempt(4 * window, 3 * window)
    made.came(1, 11)
    assert made.attempt.positions(Source.DECODE)[-1] == 11 <= made.attempt.limits(Source.DECODE)[-1]
    assert made.stream.next_position == 3 * window


async def test_a_worker_that_sends_a_prompt_beyond_its_credit_loses_the_attempt():
    window = prompt_window_of(20)
    made = PromptAttempt(4 * window)
    made.came(1, 3 + window)
    (broken,) = await made.attempt.events.take()
    assert (
        isinstance(broken, Broken)
        and "the limit is" in str(broken.error)
        and made.stream.next_position == 1 + window
    )
