"""What is computed of a prompt alone is the adapter's, too: embeddings and log probabilities, in a batch with the base."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from cluster.protocol.pooling import Pooling
from engine.request import EngineRequest, PromptEmbedding, PromptOutput, SamplingParams
from tests.engine.ranks import make_engine, steps_of
from tests.harness.adapters import make_adapter, merge
from tests.harness.checkpoints import prompt_ids, reference_logits
from tests.harness.embeddings import reference_embedding

PROMPT = prompt_ids(40)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=True)
POOLED = dataclasses.replace(SCORED, prompt_logprobs=False, pooling=Pooling.MEAN)
WITHIN = 1e-4  # as without adapters


@pytest.mark.parametrize("batch", [16, pytest.param(256, marks=pytest.mark.long)])
def test_vectors_and_scores_of_prompts_are_those_of_their_adapter(batch, checkpoint, tmp_path):
    model = checkpoint("llama")
    adapter = make_adapter(tmp_path / "a", model, rank=8)
    references = {"base": model, "own": merge(model, adapter, tmp_path / "m")}
    engine = make_engine(model, max_loras=1, max_batch_tokens=batch)
    runner: Any = engine._runner
    digests = {"base": "", "own": engine.adapters.load(adapter)}
    requests = [
        EngineRequest(f"{name} {what}", PROMPT, how, adapter=digest, salt=bytes([number]) * 16)
        for number, (name, digest) in enumerate(digests.items())
        for what, how in (("vector", POOLED), ("scores", SCORED))
    ]
    vectors, scores = dict[str, np.ndarray](), {name: list[float]() for name in digests}
    for output in steps_of(engine, *requests):
        for one in output.prompts:
            name = one.request_id.split()[0]
            if isinstance(one, PromptEmbedding):
                vectors[name] = np.frombuffer(one.vector, "<f4")
            else:
                assert isinstance(one, PromptOutput) and one.position == 1 + len(scores[name])
                scores[name] += one.scores.logprobs[:, 0].tolist()
    assert runner.adapted_rows > 0
    for name, reference in references.items():
        wanted = reference_embedding(reference, PROMPT, "mean").numpy()
        np.testing.assert_allclose(vectors[name], wanted, atol=WITHIN, rtol=0)
        logprobs = torch.log_softmax(reference_logits(reference, PROMPT), -1)
        own = [float(logprobs[at, token]) for at, token in enumerate(PROMPT[1:])]
        assert scores[name] == pytest.approx(own, abs=WITHIN)
    assert np.abs(vectors["own"] - vectors["base"]).max() > 100 * WITHIN
