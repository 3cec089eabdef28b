"""Tokens of a prompt come once and in order, whatever attempts repeat, skip or leave out."""

from __future__ import annotations

import pytest

from router.dispatch.prompt_stream import EmbeddingStream, PromptStream
from wire import common_pb2
from worker.attempt_log import AttemptLog

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


def test_a_workers_log_keeps_the_whole_prompt_and_sends_it_first():
    count = 2000  # more than a window
    sampling = common_pb2.SamplingParams(max_tokens=1, prompt_logprobs=True)
    spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4 * count), sampling=sampling, first_choice=3, n=2)
    log = AttemptLog.of(spec, lambda: None)
    for position in range(1, count):
        log.add(5, position, 0, common_pb2.Token(choice=5, position=position, rank=1))
    assert not log.full
    assert [one.choice for one in log.in_order] == [5, 3, 4]
    assert log.resume([count, count, 7], [2 * count, 2 * count, count])
    assert log.prompt is not None and log.prompt.sent == 7
    assert not log.resume([count, count], [2 * count] * 2)


def embedding(size: int = 8, position: int = 1, choice: int = 1) -> common_pb2.Token:
    return common_pb2.Token(choice=choice, position=position, embedding=bytes(size))


def test_an_embedding_comes_once_over_all_attempts():
    came: list[common_pb2.Token] = []
    broken: list[str] = []
    stream = EmbeddingStream(2, came.append)

    def take(token: common_pb2.Token) -> bool:
        return stream.takes(token, 1, lambda error: broken.append(str(error)))

    assert take(embedding(choice=0)) and take(embedding(size=12)) and take(embedding(position=0))
    assert len(broken) == 3 and not came
    assert take(embedding()) and take(embedding()) and not take(embedding(choice=0))
    assert len(broken) == 3 and len(came) == 1


def test_a_workers_log_sends_the_embedding_first_and_does_not_pause():
    sampling = common_pb2.SamplingParams(max_tokens=1, pooling=common_pb2.POOLING_MEAN)
    log = AttemptLog.of(common_pb2.GenerateSpec(prompt_tokens=bytes(4), sampling=sampling), lambda: None)
    log.add(1, 1, 0, embedding())
    assert [one.choice for one in log.in_order] == [1, 0] and log.may_send and not log.full
