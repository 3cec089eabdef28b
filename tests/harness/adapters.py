"""Adapters as PEFT writes them, with random weights, and checkpoints into which they are merged in float64."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: tuple[str, ...] = ALL,
    layers: tuple[int, ...] | None = None,
    strength: float = 0.3,
    **more: Any,
) -> Path:
    """`strength`: of what it adds, relative to the weights. `more`: keys of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    alpha = more.pop("lora_alpha", 2 * rank)
    raw = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(raw | {"target_modules": [*targets]} | more))
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _matrices(model, targets, layers):
        own = more.get("rank_pattern", {}).get(name.split(".")[-1], rank)
        a = torch.randn(own, weight.shape[1], generator=draw) / math.sqrt(weight.shape[1])
        b = torch.randn(weight.shape[0], own, generator=draw) * (
            strength * float(weight.std()) * math.sqrt(weight.shape[1] / own) * own / alpha
        )
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    return directory


def merge(model: Path, adapter: Path, into: Path, scaling: float | None = None) -> Path:
    """A checkpoint with W + B A · scaling, added up in float64; by default alpha / r."""
    shutil.copytree(model, into)
    raw = json.loads((adapter / "adapter_config.json").read_text())
    weights, added = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in added.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = added[name.replace("lora_A", "lora_B")].double()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        weight = weights[f"{module}.weight"]
        factor = raw["lora_alpha"] / len(a) if scaling is None else scaling
        weights[f"{module}.weight"] = (weight.double() + b @ a.double() * factor).to(weight.dtype)
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    return into


def _matrices(
    model: Path, targets: tuple[str, ...], layers: tuple[int, ...] | None
) -> list[tuple[str, torch.Tensor]]:
    found = []
    for key, weight in sorted(load_file(model / "model.safetensors").items()):
        name = key.removesuffix(".weight")
        parts = name.split(".")
        if (
            parts[-1] in targets
            and weight.dim() == 2
            and "layers" in parts
            and not {"experts", "vision_tower"} & set(parts)
        ):
            layer = int(parts[parts.index("layers") + 1])
            if layers is None or layer in layers:
                found.append((name, weight.float()))
    return found
