"""gpt-oss's experts in MXFP4, drawn by torch alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def blocks_of(experts: int, outputs: int, inputs: int, seed: int) -> tuple[Tensor, Tensor]:
    """Any bytes are numbers of FP4; scales are about those of weights, and include the smallest."""
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(121, 124, blocks.shape[:-1], dtype=torch.uint8, generator=draw)
    scales[0, 0, 0] = 0
    return blocks, scales


def packed(source: Path, target: Path) -> Path:
    """The checkpoint with other experts, stored as OpenAI stores them."""

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [one for one in tensors if one.endswith("proj") and ".experts." in one]:
            experts, inputs, outputs = tensors.pop(name).shape
            blocks, scales = blocks_of(experts, outputs, inputs, seed=len(tensors))
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales

    return rewritten(source, target, pack, quantization_config={"quant_method": "mxfp4"})


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None], **keys: Any) -> Path:
    """A copy of a checkpoint with changed tensors, and keys of config.json."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **keys}))
    return target
