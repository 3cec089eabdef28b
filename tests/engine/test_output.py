"""The output processor, without an engine: from logits to tokens, new choices, ends and failures."""

from __future__ import annotations

import math

import pytest

from cluster.errors import EngineRequestError
from engine.request import FinishReason, PromptChunk, TokenOutput
from engine.scheduler.sequence import SequenceState as S
from tests.engine.parts import EOS, PAGE, Parts, request

PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]  # two blocks and a half


def step(parts: Parts, *rows: int | float) -> tuple[list[TokenOutput], dict[str, object]]:
    output = parts.process(parts.scheduler.schedule(), list(rows))
    return output.tokens, {done.request_id: done for done in output.done}


def test_a_chunk_gives_no_token_and_is_charged_to_its_prompt() -> None:
    parts = Parts(8, max_batch_tokens=6)
    parts.scheduler.add(request("one", PROMPT))
    assert step(parts) == ([], {})
    (sequence,) = parts.choices("one")
    assert (sequence.num_computed, sequence.prompt_work.tokens, sequence.prompt_work.seconds) == (6, 6, 2.0)
    assert sequence.prompt_work.chunks == [PromptChunk(10.0, 12.0, 6)]
    assert (parts.counters.prompt_tokens_computed, parts.counters.prefill_chunks) == (6, 1)


def test_a_token_has_its_position_and_is_computed_next() -> None:
    parts = Parts(8)
    parts.scheduler.add(request("one", PROMPT))
    tokens, done = step(parts, 13)
    assert (tokens, done) == ([TokenOutput("one", 0, len(PROMPT), 13)], {})
    assert parts.choices("one")[0].tokens == [*PROMPT, 13]
    assert [token.position for token in step(parts, 14)[0]] == [len(PROMPT) + 1]
    assert parts.counters.output_tokens == 2


def test_full_blocks_are_cached_when_they_are_computed() -> None:
    parts = Parts(8)
    parts.scheduler.add(request("one", PROMPT))
    step(parts, 13)
    assert [report.held for report in parts.reports] == [2]
    step(parts, 14)
    step(parts, 15)
    assert [report.held for report in parts.reports] == [2, 3]
    assert parts.reports[1].hashes[:2] == parts.reports[0].hashes


def test_the_end_of_a_prompt_begins_every_choice() -> None:
    parts = Parts(8)
    parts.scheduler.add(request("one", PROMPT, n=3))
    tokens, _ = step(parts, 13)
    assert [(token.choice, token.token_id) for token in tokens] == [(0, 13), (1, 13), (2, 13)]
    assert [s.tokens for s in parts.choices("one")] == [[*PROMPT, 13]] * 3
    assert len({tuple(s.blocks) for s in parts.choices("one")}) == 1, "they share their blocks"
    tokens, _ = step(parts, 13, 14, 15)
    assert [token.token_id for token in tokens] == [13, 14, 15]


@pytest.mark.parametrize(
    ("token", "new", "reason"), [(EOS, 9, FinishReason.STOP), (13, 1, FinishReason.LENGTH)]
)
def test_the_last_token_ends_the_request_and_frees_its_blocks(
    token: int, new: int, reason: FinishReason
) -> None:
    parts = Parts(8)
    parts.scheduler.add(request("one", PROMPT, new))
    tokens, done = step(parts, token)
    assert [one.finish for one in tokens] == [reason]
    assert set(done) == {"one"} and not parts.scheduler.requests
    assert parts.pool.num_free == 8


def test_a_request_ends_with_its_last_choice() -> None:
    parts = Parts(12)
    parts.scheduler.add(request("one", PROMPT, n=2))
    step(parts, 13)
    tokens, done = step(parts, EOS, 13)
    assert [one.finish for one in tokens] == [FinishReason.STOP, None] and not done
    assert [s.state for s in parts.choices("one")] == [S.FINISHED, S.RUNNING]
    assert set(step(parts, EOS)[1]) == {"one"}
    assert parts.pool.num_free == 12


def test_a_prompt_alone_is_done_with_its_first_tokens_and_keeps_its_blocks() -> None:
    parts = Parts(8)
    parts.scheduler.add(request("one", PROMPT, prefill_only=True, n=2))
    tokens, done = step(parts, 13)
    assert len(tokens) == 2 and set(done) == {"one"}
    (sequence,) = parts.choices("one")
    assert (sequence.state, len(sequence.blocks)) == (S.HELD, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_its_request_alone(bad: float) -> None:
    parts = Parts(16)
    parts.scheduler.add(request("bad", PROMPT, n=2))
    parts.scheduler.add(request("good", [9] * PAGE))
    step(parts, 13, 13)
    tokens, done = step(parts, bad, 14, 15)
    assert [(one.request_id, one.token_id) for one in tokens] == [("good", 15)]
    (failed,) = done.values()
    assert isinstance(failed.error, EngineRequestError)  # type: ignore[attr-defined]
    assert set(parts.scheduler.requests) == {"good"}
    assert len(parts.pool.chains()) == 1, "what the failed request computed is no longer found"


def test_a_failed_request_that_exports_keeps_its_blocks() -> None:
    parts = Parts(8)
    parts.scheduler.add(request("bad", PROMPT, prefill_only=True, export=True))
    _, done = step(parts, math.nan)
    assert set(done) == {"bad"}
    (sequence,) = parts.choices("bad")
    assert (sequence.state, len(sequence.blocks)) == (S.HELD, 3)
    assert not parts.scheduler.has_work
