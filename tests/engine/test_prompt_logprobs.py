"""Log probabilities of a prompt's tokens equal those of Hugging Face, however the prompt is computed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine import prompt_scores
from engine.engine import Engine
from engine.request import EngineRequest, SamplingParams, TokenOutput
from engine.runner import ModelRunner
from tests.engine.ranks import engine_of, make_engine, runners
from tests.harness.checkpoints import prompt_ids, reference_logits

TOP = 3
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=TOP)
PROMPT = prompt_ids(70)
WITHIN = 1e-4  # as the logits in test_parity.py


def scored(engine: Engine, *requests: EngineRequest) -> dict[str, list[TokenOutput]]:
    for request in requests:
        engine.add(request)
    found: dict[str, list[TokenOutput]] = {request.request_id: [] for request in requests}
    waiting = set(found)
    while waiting:
        output = engine.step()
        for token in output.prompt_tokens:
            found[token.request_id].append(token)
        for done in output.done:
            assert done.error is None
            waiting.remove(done.request_id)
            engine.abort(done.request_id)
    assert engine.stats().blocks_held == 0
    return found


def assert_scores(model, prompt: list[int], tokens: list[TokenOutput], n: int = 1) -> None:
    logprobs = torch.log_softmax(reference_logits(model, prompt), -1)
    assert [(t.choice, t.position, t.token_id) for t in tokens] == [
        (n, position, prompt[position]) for position in range(1, len(prompt))
    ]
    for row, token in zip(logprobs, tokens, strict=False):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=WITHIN)
        best = row.topk(TOP)
        assert [value for _, value in token.top_logprobs] == pytest.approx(best.values.tolist(), abs=WITHIN)
        for token_id, value in token.top_logprobs:
            assert value == pytest.approx(float(row[token_id]), abs=WITHIN)
        assert (
            abs(token.rank - 1 - int((row > row[token.token_id]).sum())) <= 1
        )  # near-ties may change places


@pytest.mark.parametrize(
    ("batch", "entries"),
    [
        (16, 512 * 5),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((256, 1 << 22), (16, 1 << 22), (256, 2560))),
    ],
)
def test_a_prompt_has_the_references_log_probabilities(batch, entries, checkpoint, monkeypatch):
    """Whole or in chunks, in ranges of rows; also where its prefix is cached, and is used by others."""
    monkeypatch.setattr(prompt_scores, "RANGE_ENTRIES", entries)
    model = checkpoint("llama")
    engine = make_engine(model, max_batch_tokens=batch)
    plain = dataclasses.replace(SCORED, prompt_logprobs=False)
    assert scored(engine, EngineRequest("before", PROMPT, plain)) == {"before": []}
    other = EngineRequest("other", prompt_ids(9, seed=1), SCORED, n=2)
    found = scored(engine, EngineRequest("scored", PROMPT, SCORED, prefill_only=True), other)
    assert_scores(model, PROMPT, found["scored"])
    assert_scores(model, other.prompt_tokens, found["other"], n=2)
    assert engine.stats().prompt_tokens_cached == 0
    scored(engine, EngineRequest("after", PROMPT, plain))
    assert engine.stats().prompt_tokens_cached == 64


def test_two_ranks_give_those_of_one(checkpoint):
    with runners(checkpoint("llama"), 2) as ranks:
        found = scored(engine_of(ranks[0]), EngineRequest("r", PROMPT, SCORED))
    assert_scores(checkpoint("llama"), PROMPT, found["r"])


def test_a_preempted_prompt_reports_each_token_once(checkpoint):
    engine = make_engine(checkpoint("llama"), max_batch_tokens=16)
    engine.add(EngineRequest("r", PROMPT, SCORED))
    first = engine.step().prompt_tokens + engine.step().prompt_tokens
    from engine.scheduler.decision import StepDecision

    (sequence,) = engine._scheduler.requests["r"]
    engine._scheduler._preempt(sequence, StepDecision())
    rest: list[TokenOutput] = []
    while engine._scheduler.requests:
        rest += engine.step().prompt_tokens
    assert len(first) == 32
    assert_scores(checkpoint("llama"), PROMPT, first + rest)


def test_numbers_that_are_none_end_the_request(checkpoint, monkeypatch):
    engine = make_engine(checkpoint("llama"))
    monkeypatch.setattr(ModelRunner, "take_scores", lambda self: [[prompt_scores.Score(float("nan"), 1, ())]])
    engine.add(EngineRequest("r", [5, 6], SCORED))
    (done,) = engine.step().done
    assert done.error is not None and "not finite" in done.error.message
    assert engine.stats().blocks_held == 0
