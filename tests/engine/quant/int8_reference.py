"""What int8 models are compared with: bf16 products of the rounded weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from engine.request import SamplingParams
from tests.harness import fake_quant

NEW = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
# A number that lies between two integers may be rounded to either, where sums before it were taken in another order. One
# such row moves logits, which reach 40 here. The reference's own, of a whole text and token by token, differ by 0.72.
NEAR_TIE, MAX_TIES = 0.75, 4  # of 32 tokens


@functools.cache
def reference(path: Path, head: bool) -> Any:
    return fake_quant.fake_quantized(path, head=head)


@torch.inference_mode()
def assert_reference(model: Path, prompt: list[int], tokens: list[int], *, head: bool = True) -> None:
    """Each token is the reference's best after those before it, or nearly so."""
    logits = reference(model, head)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    behind = logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert behind.max() < NEAR_TIE, f"token {int(behind.argmax())} is {behind.max()} behind the best one"
    assert (behind == 0).sum() >= len(tokens) - MAX_TIES, f"too many near-ties: {behind.tolist()}"
