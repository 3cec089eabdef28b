"""Quantised checkpoints on the GPU: their logits are the CPU's, in every format that other projects' packers wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.plan import PlanItem, StepPlan
from tests.gpu.test_correct import runner_of

pytestmark = pytest.mark.gpu
GOLDEN = Path(__file__).resolve().parents[1] / "engine/golden"
NAMES = sorted(path.name for path in (GOLDEN / "formats").iterdir())
IDS = [5 + 3 * i % 50 for i in range(90)]
STEPS = [(0, 50), (50, 88), (88, 89), (89, 90)]
# In fp32, of logits of magnitude 10. A number between two int8 codes may be rounded to either, which moves some logits.
CLOSE, OF_MOST, NEAR_TIE = 1e-3, 2e-3, 0.5


def logits(path: Path, device: str, **settings: object) -> Tensor:
    """[8, vocab] of two sequences: chunks, and a token of each."""
    runner = runner_of(path, **{"device": device, "dtype": "float32", "attention_backend": "sdpa"} | settings)
    found = []
    for begin, end in STEPS:
        count = -(-end // runner.page_size)
        items = [
            PlanItem("one", IDS[begin:end], begin, list(range(10, 10 + count)), 0, 1),
            PlanItem("other", IDS[::-1][begin:end], begin, list(range(30, 30 + count)), 1, 1),
        ]
        found.append(runner.execute(StepPlan(items, [])).float().cpu())
    return torch.cat(found)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_expanded_weights_are_the_cpus(name, device):
    path = GOLDEN / "formats" / name
    difference = (logits(path, device) - logits(path, "cpu")).abs()
    assert float(difference.max()) <= CLOSE


@pytest.mark.parametrize("name", ["int8", "formats/awq", "formats/fp8-channel"])
def test_logits_in_int8_are_the_cpus(name, device):
    path = GOLDEN / name
    difference = (logits(path, device, quantization="int8") - logits(path, "cpu", quantization="int8")).abs()
    assert float(difference.median()) <= OF_MOST and float(difference.max()) <= NEAR_TIE
