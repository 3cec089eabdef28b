"""Pairs of measurements: their ratios, and the checkout of another commit and its removal."""

from __future__ import annotations

import random
import statistics
import subprocess
from pathlib import Path

import pytest

from bench.pairs.ratios import interval, ratios
from bench.pairs.trees import checked_out


def sample(seconds: float) -> dict[str, float]:
    return {"a": seconds, "b": 2.0}


def test_ratios_are_of_pairs_not_of_medians():
    """Both trees on a machine whose speed changes from pair to pair: the second is always 10 % slower."""
    found, _ = ratios([(sample(base), sample(base * 1.1)) for base in (1.0, 5.0, 2.0, 9.0)])
    assert found.name == "a" and found.pairs == 4
    assert found.median == pytest.approx(1.1)
    assert found.low == pytest.approx(1.1) == found.high


def test_figures_of_one_tree_only_are_left_out():
    assert [one.name for one in ratios([({"a": 1.0, "old": 1.0}, {"a": 1.0, "new": 1.0})])] == ["a"]
    assert ratios([]) == []


def test_the_interval_holds_the_true_median_about_as_often_as_stated():
    source = random.Random(5)
    hits = 0
    for _ in range(200):
        values = [source.lognormvariate(0.0, 0.1) for _ in range(20)]
        low, high = interval(values, 400)
        assert low <= statistics.median(values) <= high
        hits += low <= 1.0 <= high
    assert 175 <= hits <= 200


def test_a_commit_is_checked_out_and_taken_away(tmp_path):
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=False, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("not a git checkout")
    with checked_out("HEAD", tmp_path) as tree:
        assert tree.commit == head.stdout.strip()
        assert (tree.path / "bench" / "checkpoint.py").is_file()
    assert not tree.path.exists()
    listed = subprocess.run(["git", "worktree", "list"], check=True, capture_output=True, text=True).stdout
    assert str(tmp_path) not in listed


def test_a_missing_commit_is_reported(tmp_path: Path):
    with pytest.raises(SystemExit, match="nonsense"), checked_out("nonsense", tmp_path):
        pass
