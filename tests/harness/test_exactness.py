"""The judge of the exactness tests: it goes on after a near-tie, and lets nothing else pass."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness import exactness
from tests.harness.checkpoints import gate_gaps, prompt_ids, reference_greedy, reference_logits
from tests.harness.exactness import assert_greedy, judge
from tests.harness.model_text import VOCAB

NEW = 24


@pytest.fixture
def tied(checkpoint, monkeypatch):
    """A reference whose second best token at position 5 of the answer is as good as its best, within 5e-6."""
    model, prompt = checkpoint("llama"), prompt_ids(30, seed=77)
    best = reference_greedy(model, prompt, NEW)
    row = len(prompt) + 4
    other = int(reference_logits(model, prompt + best)[row].topk(2).indices[1])

    def logits(path, tokens):
        found = reference_logits(path, tokens).clone()
        found[row, other] = found[row].max() - 5e-6
        return found

    monkeypatch.setattr(exactness, "reference_logits", logits)
    monkeypatch.setattr(exactness, "COMPARED", {})
    branch = [*best[:5], other]
    return model, prompt, [*branch, *reference_greedy(model, prompt + branch, NEW - len(branch))]


def test_the_other_side_of_a_near_tie_is_counted(tied):
    model, prompt, tokens = tied
    assert_greedy("a way", model, prompt, tokens)
    assert {"a way": exactness.Compared(answers=1, tokens=NEW, near_ties=1)} == exactness.COMPARED
    assert judge(model, prompt, tokens, gap=1e-7).wrong == [5]


def test_a_wrong_token_after_a_near_tie_is_found(tied):
    model, prompt, tokens = tied
    worst = int(torch.argmin(reference_logits(model, prompt + tokens)[len(prompt) + 14]))
    tokens[15] = worst
    with pytest.raises(AssertionError, match=r"wrong at \[15"):
        assert_greedy("a way", model, prompt, tokens)
    assert not exactness.COMPARED


def test_a_wrong_token_with_no_near_tie_is_found(checkpoint):
    model, prompt = checkpoint("llama"), prompt_ids(30, seed=77)
    tokens = reference_greedy(model, prompt, NEW)
    tokens[3] = (tokens[3] + 1) % 512
    with pytest.raises(AssertionError, match=r"wrong at \[3"):
        assert_greedy("a way", model, prompt, tokens)


def test_answers_after_an_undecided_router_are_counted_apart(checkpoint, tmp_path, monkeypatch):
    """All experts of a layer have the same gate: the reference's choice is one of many."""
    model, prompt = Path(shutil.copytree(checkpoint("qwen2-moe"), tmp_path / "model")), prompt_ids(20)
    assert math.isinf(min(gate_gaps(checkpoint("llama"), prompt)))
    assert all(0 < gap < 1 for gap in gate_gaps(checkpoint("qwen2-moe"), prompt))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[:] = tensor[:1].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    expected = reference_greedy(model, prompt, 4)
    monkeypatch.setattr(exactness, "COMPARED", {})
    assert_greedy("undecided", model, prompt, [*expected[:3], (expected[3] + 1) % VOCAB])
    assert {"undecided": exactness.Compared(answers=1, gate_ties=1)} == exactness.COMPARED
