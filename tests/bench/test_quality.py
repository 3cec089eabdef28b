"""Quantised checkpoints are read back as the nearest codes, and the section measures the loss of the model's own text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bench import quantized_checkpoints
from bench.sections import engine, quality
from bench.sections.quality import Form, Measured
from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from tests.harness.checkpoints import prompt_ids, reference_logits

MATRIX = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", quantized_checkpoints.FORMATS)
def test_rounded_weights_are_within_half_a_code(name, checkpoint, tmp_path):
    source = checkpoint("llama")
    expected = load_file(source / "model.safetensors")[MATRIX].float()
    outputs, inputs = expected.shape
    target = quantized_checkpoints.write(source, tmp_path / "rounded", quantized_checkpoints.FORMATS[name])
    quantization = ModelConfig.read(target).quantization
    weights = Checkpoint(target, torch.float32, torch.device("cpu"), quantization=quantization)
    read = weights.matrix(MATRIX, outputs, inputs)
    assert isinstance(read, Tensor)
    scales = load_file(target / "model.safetensors")[MATRIX + "_scale"].float()
    step = scales.repeat_interleave(inputs // scales.shape[1], 1)
    if "FP8" in name:  # three bits of mantissa; subnormal codes are 2⁻⁹ apart
        step = torch.maximum(expected.abs() * 2**-3, step * 2**-9)
    off = (read - expected).abs() / step
    assert 0.4 < float(off.max()) <= 0.51


@pytest.mark.parametrize("name", quantized_checkpoints.FORMATS)
def test_rows_of_zeros_stay_zeros(name):
    stored = quantized_checkpoints.FORMATS[name].store(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert all(bool(one.float().isfinite().all()) for one in stored.values())


@pytest.mark.long
def test_losses_are_the_references(checkpoint):
    source = checkpoint("llama")
    windows = [prompt_ids(70, seed=seed) for seed in (1, 2)]
    found = quality.measure(engine.load(source, "cpu"), windows)
    for tokens, loss in zip(windows, found.losses, strict=True):
        logits = reference_logits(source, tokens)[:-1]
        own = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="sum")
        assert abs(loss / float(own) - 1) < 0.01
    assert len(found.best) == 2 * 69


def test_figures_compare_with_bf16():
    """Each token of a window costs a hundredth of a nat more, and one in eight is another."""
    count = quality.WINDOW - 1
    best = torch.arange(8)
    plain = Measured(np.array([3.0, 5.0]) * count, best, 100)
    worse = Measured(plain.losses + 0.01 * count, best.clamp(max=6), 50)
    lost, same, size = quality._figures(Form("f", 8, quality.SHIPPED, {}), plain, worse)
    assert lost.value == pytest.approx(100 * np.expm1(0.01)) and lost.met is False
    assert lost.note.startswith("1.01 to 1.01; ")
    assert same.value == 87.5
    assert (size.value, size.note) == (50e-6, "bf16 0.0 MB; the file 15.9 MB")


def test_windows_of_the_demo_model_begin_texts():
    from demo.train import BOS

    windows = list(quality._windows(quality.SHIPPED, 3))
    assert [len(window) for window in windows] == [quality.WINDOW] * 3
    assert all(window[0] == BOS for window in windows)
