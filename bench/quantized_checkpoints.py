"""Quantises checkpoints by rounding to nearest (RTN), without calibration.

A channel's or group's scale maps its largest weight to the largest code. Methods that calibrate (GPTQ, AWQ) lose less.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 64  # inputs that share a scale of 4 bits
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_INT4_MAX = 7
_PER_WORD = 8
_HEAD = "lm_head"


class QuantizedFormat(NamedTuple):
    """A format of compressed-tensors. `layout`: its name there; `weights`: its arguments of weights; `store`: a matrix
    [outputs, inputs] → the tensors that store it, by the last part of their names."""

    layout: str
    weights: dict[str, Any]
    store: Callable[[Tensor], dict[str, Tensor]]


def write(source: Path, target: Path, form: QuantizedFormat) -> Path:
    """Write the checkpoint `source` to `target` with the matrices of its layers in `form`; embedding and head stay as they
    are. Returns `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, target)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in name and tensor.dim() == 2:
            at = name.removesuffix(".weight")
            tensors |= {f"{at}.{key}": value for key, value in form.store(tensor).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    group = {"weights": form.weights, "input_activations": None, "targets": ["Linear"]}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": form.layout,
        "ignore": [_HEAD],
        "config_groups": {"group_0": group},
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def _weights(**changes: Any) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
    } | changes


def _scale(largest: Tensor, code: float) -> Tensor:
    """The scale that maps `largest` to `code`; 1 where it would be 0."""
    scale = (largest.float() / code).to(largest.dtype)
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _fp8(matrix: Tensor) -> dict[str, Tensor]:
    scale = _scale(matrix.abs().amax(1, keepdim=True), _FP8_MAX)
    return {"weight": (matrix.float() / scale.float()).to(torch.float8_e4m3fn), "weight_scale": scale}


def _int4(matrix: Tensor) -> dict[str, Tensor]:
    outputs, inputs = matrix.shape
    groups = matrix.view(outputs, -1, GROUP)
    scale = _scale(groups.abs().amax(2, keepdim=True), _INT4_MAX)
    codes = (groups.float() / scale.float()).round().clamp(-_INT4_MAX - 1, _INT4_MAX).to(torch.int32) + 8
    words = codes.view(outputs, -1, _PER_WORD) << (4 * torch.arange(_PER_WORD, dtype=torch.int32))
    return {
        "weight_packed": words.sum(2, dtype=torch.int32),  # disjoint bits: the sum is their OR
        "weight_scale": scale.squeeze(2),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


FORMATS = {
    "FP8, a scale per channel": QuantizedFormat("float-quantized", _weights(), _fp8),
    f"4 bits, groups of {GROUP}": QuantizedFormat(
        "pack-quantized", _weights(num_bits=4, type="int", strategy="group", group_size=GROUP), _int4
    ),
}
