"""Golden checkpoints in the formats of other projects, and copies of them that are changed."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.weights import Checkpoint
from engine.quant import stored

GOLDEN = Path(__file__).with_name("golden") / "formats"
SHAPES = {
    **{f"self_attn.{name}_proj": (64 if name in "qo" else 32, 64) for name in "qkvo"},
    **{f"mlp.{name}_proj": (96, 64) for name in ("gate", "up")},
    "mlp.down_proj": (64, 96),
}


def checkpoint_of(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(path, dtype, torch.device("cpu"), quantization=ModelConfig.read(path).quantization)


def expanded(checkpoint: Checkpoint, name: str, *shape: int, **part: slice) -> Tensor:
    found = checkpoint.matrix(name, *shape, **part)
    assert isinstance(found, Tensor)
    assert found.untyped_storage().nbytes() == found.numel() * found.itemsize, "it keeps more than itself"
    return found


@functools.cache
def matrices(name: str) -> dict[str, Tensor]:
    checkpoint = checkpoint_of(GOLDEN / name)
    names = {f"model.layers.0.{part}.weight": shape for part, shape in SHAPES.items()}
    return {tensor: expanded(checkpoint, tensor, *shape) for tensor, shape in names.items()}


class Tensors(dict[str, Tensor]):
    """A `Source` of tensors in memory."""

    def has(self, name: str) -> bool:
        return name in self

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self[name].shape)

    def part(self, name: str, shape: tuple[int, ...], *parts: slice | int, why: str = "") -> Tensor:
        assert tuple(self[name].shape) == shape, (name, why)
        return self[name][parts[: len(shape)]]


def whole(outputs: int, inputs: int) -> stored.Matrix:
    return stored.Matrix("m", outputs, inputs, slice(0, outputs), slice(0, inputs))


def changed(name: str, path: Path, **changes: object) -> Path:
    shutil.copytree(GOLDEN / name, path, dirs_exist_ok=True)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(raw))
    return path


def group_of(name: str, part: str, **changes: object) -> dict[str, object]:
    raw = json.loads((GOLDEN / name / "config.json").read_text())
    group = raw["quantization_config"]["config_groups"]["group_0"]
    return {"config_groups": {"g": group | {part: (group[part] or {}) | changes}}}


DOWN = "model.layers.0.mlp.down_proj"
