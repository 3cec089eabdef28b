"""Embeddings equal those of Hugging Face's base model, however the prompt is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cluster.protocol.pooling import Pooling
from engine.engine import Engine
from engine.request import EngineRequest, PromptEmbedding, SamplingParams
from engine.runner import ModelRunner
from engine.scheduler.decision import StepDecision
from tests.engine.ranks import engine_of, make_engine, runners, steps_of
from tests.harness.checkpoints import prompt_ids
from tests.harness.embeddings import make_base_model, make_embedding_model, reference_embedding

MODES = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST_TOKEN, "max": Pooling.MAX}
PLAIN = SamplingParams(temperature=0.0, max_tokens=1)
PROMPT = prompt_ids(70)
WITHIN = 1e-4  # as the logits in test_parity.py: hidden states after the norm are of the same size


def asked(name: str, prompt: list[int], mode: str = "mean", **more: Any) -> EngineRequest:
    return EngineRequest(name, prompt, dataclasses.replace(PLAIN, pooling=MODES[mode]), **more)


def embedded(engine: Engine, *requests: EngineRequest) -> dict[str, np.ndarray]:
    """The vector of each request that asks for one; each comes once, before its request's end."""
    found: dict[str, np.ndarray] = {}
    for output in steps_of(engine, *requests):
        for one in output.prompts:
            assert isinstance(one, PromptEmbedding) and one.request_id not in found
            found[one.request_id] = np.frombuffer(one.vector, "<f4")
    return found


def assert_equal(model, request: EngineRequest, mode: str, vector: np.ndarray) -> None:
    wanted = reference_embedding(model, request.prompt_tokens, mode).numpy()
    assert vector.dtype == np.dtype("<f4")
    np.testing.assert_allclose(vector, wanted, atol=WITHIN, rtol=0)


def test_each_pooling_gives_the_references_vector_in_chunks_and_in_a_batch(checkpoint):
    model = checkpoint("llama")
    engine = make_engine(model, max_batch_tokens=16)
    requests = {mode: asked(mode, prompt_ids(70, seed=seed), mode) for seed, mode in enumerate(MODES)}
    short = {f"short {mode}": asked(f"short {mode}", [7], mode) for mode in MODES}
    plain = EngineRequest("plain", prompt_ids(30, seed=9), dataclasses.replace(PLAIN, max_tokens=8))
    found = embedded(engine, plain, *requests.values(), *short.values())
    assert set(found) == {*requests, *short}
    for name, request in {**requests, **short}.items():
        assert_equal(model, request, name.removeprefix("short "), found[name])


def test_two_ranks_give_the_vector_of_one(checkpoint):
    model, request = checkpoint("llama"), asked("r", PROMPT)
    with runners(model, 2, max_batch_tokens=32) as ranks:
        found = embedded(engine_of(ranks[0]), request)
    assert_equal(model, request, "mean", found["r"])


@pytest.mark.parametrize(("mode", "cached"), [("lasttoken", 64), ("mean", 0)])
def test_only_the_last_token_takes_a_cached_prefix(mode, cached, checkpoint):
    model = checkpoint("llama")
    engine = make_engine(model)
    embedded(engine, EngineRequest("before", PROMPT, PLAIN))
    request = asked("r", PROMPT, mode)
    assert_equal(model, request, mode, embedded(engine, request)["r"])
    assert engine.stats().prompt_tokens_cached == cached
    assert engine.stats().prompt_tokens_computed == 2 * len(PROMPT) - cached


def test_a_preempted_prompt_is_pooled_from_its_beginning(checkpoint):
    model, request = checkpoint("llama"), asked("r", PROMPT)
    engine = make_engine(model, max_batch_tokens=16)
    engine.add(request)
    assert not engine.step().prompts
    (sequence,) = engine._scheduler.requests["r"]
    engine._scheduler.preempt(sequence, StepDecision())
    made = []
    while engine._scheduler.requests:
        made += engine.step().prompts
    (one,) = made
    assert isinstance(one, PromptEmbedding)
    assert_equal(model, request, "mean", np.frombuffer(one.vector, "<f4"))


def test_numbers_that_are_none_end_the_request(checkpoint, monkeypatch):
    engine = make_engine(checkpoint("llama"))
    monkeypatch.setattr(ModelRunner, "take_pooled", lambda self: [torch.tensor([1.0, torch.inf])])
    engine.add(asked("r", [5, 6]))
    output = engine.step()
    (done,) = output.done
    assert done.error is not None and "not finite" in done.error.message
    assert not output.prompts and engine.stats().blocks_held == 0


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_a_base_model_gives_the_vectors_of_the_whole_one(checkpoint, tmp_path, variant):
    model = checkpoint(variant)
    base = make_base_model(make_embedding_model(model, tmp_path / "base", "lasttoken", is_matryoshka=True))
    request = asked("r", prompt_ids(20), "lasttoken")
    engine = make_engine(base)
    assert_equal(model, request, "lasttoken", embedded(engine, request)["r"])
