"""Decode with drafts beside decode without, on the GPU: scripted drafts, and those of a draft model of a tenth of the
weights. It prints figures and asserts none: an engine's answers with drafts are compared in test_cluster.py."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from bench.checkpoint import ModelShape, write_model
from bench.sections import speculation
from tests.gpu.cards import CARDS

pytestmark = pytest.mark.gpu
VOCAB = CARDS["8B"].vocab
TARGET = replace(CARDS["8B"], layers=16, context_tokens=2048)  # with 8 GB it is written in half the time
DRAFT = ModelShape(
    8, 1024, heads=16, kv_heads=8, head_dim=64, intermediate=4096, vocab=VOCAB, context_tokens=2048
)
SMALL = ModelShape(2, 256, heads=4, kv_heads=2, head_dim=64, intermediate=512, vocab=4096)
SMALL_DRAFT = ModelShape(1, 128, heads=2, kv_heads=2, head_dim=64, intermediate=256, vocab=4096)


def test_figures_with_drafts(device, tmp_path, show):
    card = device == "cuda"
    shape, draft = (TARGET, DRAFT) if card else (SMALL, SMALL_DRAFT)
    path = write_model(tmp_path / "model", shape, device=device)
    write_model(tmp_path / "draft", draft, device=device)
    figures = speculation.measure(path, device, tmp_path / "draft", 5 if card else 1)
    shutil.rmtree(path)
    what = f"up to {speculation.DRAFTS} drafts, batch 1, beside decode without drafts"
    show(f"{what}; 16 layers of the 8B shape" if card else what, figures)
    assert all(figure.value > 0 for figure in figures)
