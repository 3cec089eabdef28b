"""Logits in bf16 are as near to exact ones as those of Hugging Face in bf16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from engine.build import load_model
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner
from tests.engine.ranks import KV_BYTES
from tests.harness.checkpoints import prompt_ids, reference_model

# Of the reference's error: ours is 0.88 to 0.97 of it. With 1 + w rounded to bf16 Gemma 2 has 1.08 and Gemma 3 1.22.
WITHIN = 1.05
PROMPTS, TOKENS, BLOCKS = 12, 40, 3


def rms(errors: Tensor) -> Tensor:
    return errors.square().mean(-1).sqrt()


@pytest.mark.long
@pytest.mark.parametrize("variant", ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3-moe", "gpt-oss"])
@torch.inference_mode()
def test_logits_are_as_near_as_the_references(variant, checkpoint):
    """Medians over all positions: in a mixture a rounded router takes another expert now and then, here or there, and the
    rest of that prompt differs."""
    model = checkpoint(variant)
    theirs = reference_model(model, torch.bfloat16)
    exact = copy.deepcopy(theirs).double()  # with the same weights
    config = EngineConfig(model=model, dtype="bfloat16", kv_memory_bytes=KV_BYTES, max_batch_tokens=4096)
    runner = ModelRunner(load_model(config))
    own, reference = [], []
    for seed in range(PROMPTS):
        tokens = prompt_ids(TOKENS, seed)
        expected = exact(torch.tensor([tokens])).logits[0]
        reference.append(rms(theirs(torch.tensor([tokens])).logits[0].double() - expected))
        items = [
            PlanItem(str(n), tokens[:n], 0, list(range(BLOCKS * n, BLOCKS * (n + 1))), n, 1)
            for n in range(1, TOKENS + 1)
        ]
        own.append(rms(runner.execute(StepPlan(items, [])).double() - expected))
    ratio = float(torch.cat(own).median() / torch.cat(reference).median())
    print(f"{variant}: {ratio:.2f} of the reference's error")
    assert ratio < WITHIN
