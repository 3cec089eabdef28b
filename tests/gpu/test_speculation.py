"""Decode with drafts beside decode without, on the GPU: scripted drafts, and those of a draft model of an eighth of the
weights. It prints figures and asserts none: an engine's answers with drafts are compared in test_cluster.py."""

from __future__ import annotations

import shutil

import pytest

from bench.checkpoint import ModelShape, write_model
from bench.sections import speculation
from tests.gpu.test_figures import CARDS

pytestmark = pytest.mark.gpu
SMALL = ModelShape(2, 256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=4096)
SMALL_DRAFT = ModelShape(1, 128, heads=2, kv_heads=2, head_dim=64, intermediate=256, vocab=4096)


def test_figures_with_drafts(device, tmp_path, show):
    card = device == "cuda"
    shape, draft = (CARDS["8B"], CARDS["1B"]) if card else (SMALL, SMALL_DRAFT)
    path = write_model(tmp_path / "model", shape, device=device)
    write_model(tmp_path / "draft", draft, device=device)
    figures = speculation.measure(path, device, tmp_path / "draft", 5 if card else 1)
    shutil.rmtree(path)  # the 8B model has 16 GB
    show(f"up to {speculation.DRAFTS} drafts, batch 1, beside decode without drafts", figures)
    assert all(figure.value > 0 for figure in figures)
