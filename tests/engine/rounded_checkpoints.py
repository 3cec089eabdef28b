"""What weights that are rounded while they are loaded are compared with: the definition, and checkpoints that store it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HOW = ("int4", "fp8")
GROUP = 128


def rounded(weight: Tensor, how: str) -> Tensor:
    """The definition, group by group. float32."""
    out = torch.empty_like(weight, dtype=torch.float32)
    for row, numbers in enumerate(weight.float()):
        for at in range(0, len(numbers), GROUP):
            group = numbers[at : at + GROUP]
            if how == "int4":
                low, high = group.min(), group.max()
                scale = (high if high > -low else low) / -8
                codes = (group / scale).round().clamp(-8, 7)
            else:
                scale = group.abs().max() / 448
                codes = (group / scale).to(torch.float8_e4m3fn).float()
            out[row, at : at + GROUP] = codes * scale
    return out


def reference_of(model: Path, how: str, target: Path) -> Path:
    """A checkpoint that stores the rounded numbers."""
    shutil.copytree(model, target)
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = rounded(tensor, how)
    save_file({name: one.float() for name, one in tensors.items()}, target / "model.safetensors")
    return target
