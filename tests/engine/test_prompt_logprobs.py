"""Log probabilities of a prompt's tokens equal those of Hugging Face, however the prompt is computed."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine import prompt_scores
from engine.engine import Engine
from engine.request import EngineRequest, PromptOutput, SamplingParams, StepOutput
from engine.runner import ModelRunner
from tests.engine.ranks import engine_of, make_engine, runners, steps_of
from tests.harness.checkpoints import prompt_ids, reference_logits

TOP = 3
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=TOP)
PROMPT = prompt_ids(70)
WITHIN = 1e-4  # as the logits in test_parity.py


def scores_of(output: StepOutput) -> list[PromptOutput]:
    return [one for one in output.prompts if isinstance(one, PromptOutput)]


def scored(engine: Engine, *requests: EngineRequest) -> dict[str, list[PromptOutput]]:
    found: dict[str, list[PromptOutput]] = {request.request_id: [] for request in requests}
    for output in steps_of(engine, *requests):
        for one in scores_of(output):
            found[one.request_id].append(one)
    return found


def assert_scores(model, prompt: list[int], outputs: list[PromptOutput]) -> None:
    logprobs = torch.log_softmax(reference_logits(model, prompt), -1)
    position = 1
    for output in outputs:
        assert output.position == position
        scores = output.scores
        for row in range(len(scores)):
            own, best = logprobs[position - 1], logprobs[position - 1].topk(TOP)
            ids, values = scores.token_ids[row].tolist(), scores.logprobs[row].tolist()
            assert ids[0] == prompt[position]
            for token_id, value in zip(ids, values, strict=True):
                assert value == pytest.approx(float(own[token_id]), abs=WITHIN)
            assert values[1:] == pytest.approx(best.values.tolist(), abs=WITHIN)
            rank = int((own > own[prompt[position]]).sum()) + 1
            assert abs(int(scores.ranks[row]) - rank) <= 1  # near-ties may change places
            position += 1
    assert position == len(prompt)


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
    assert_scores(model, other.prompt_tokens, found["other"])
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
    first = scores_of(engine.step()) + scores_of(engine.step())
    from engine.scheduler.decision import StepDecision

    (sequence,) = engine._scheduler.requests["r"]
    engine._scheduler.preempt(sequence, StepDecision())
    rest: list[PromptOutput] = []
    while engine._scheduler.requests:
        rest += scores_of(engine.step())
    assert sum(len(one.scores) for one in first) == 32
    assert_scores(checkpoint("llama"), PROMPT, first + rest)


def test_numbers_that_are_none_end_the_request(checkpoint, monkeypatch):
    engine = make_engine(checkpoint("llama"))
    ones = np.ones((1, 1), np.uint32)
    nothing = prompt_scores.Scores(ones[0], ones, np.full((1, 1), np.nan, np.float32))
    monkeypatch.setattr(ModelRunner, "take_scores", lambda self: [nothing])
    engine.add(EngineRequest("r", [5, 6], SCORED))
    (done,) = engine.step().done
    assert done.error is not None and "not finite" in done.error.message
    assert engine.stats().blocks_held == 0


def test_choices_that_are_computed_again_report_no_prompt_and_use_what_is_cached(checkpoint):
    """With prompt log probabilities and an answer: both choices lose their blocks after the prompt was reported."""
    from engine.scheduler.decision import StepDecision

    engine = make_engine(checkpoint("llama"))
    sampling = dataclasses.replace(SCORED, max_tokens=6, ignore_eos=True)
    engine.add(EngineRequest("r", PROMPT, sampling, n=2))
    outputs = [engine.step() for _ in range(3)]
    for sequence in list(engine._scheduler.requests["r"]):
        engine._scheduler.preempt(sequence, StepDecision())
    while engine._scheduler.requests:
        outputs.append(engine.step())
    assert_scores(checkpoint("llama"), PROMPT, [one for output in outputs for one in scores_of(output)])
    tokens = [(one.choice, one.position) for output in outputs for one in output.tokens]
    assert sorted(tokens) == [(choice, len(PROMPT) + i) for choice in range(2) for i in range(6)]
    assert engine.stats().prompt_tokens_cached >= 64
