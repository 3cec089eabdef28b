"""The judge of the exactness tests: it goes on after a near-tie, and lets nothing else pass."""

from __future__ import annotations

import pytest
import torch

from tests.harness import exactness
from tests.harness.checkpoints import prompt_ids, reference_greedy, reference_logits
from tests.harness.exactness import assert_greedy, judge

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
