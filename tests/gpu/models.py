"""The checkpoints of tests/harness/checkpoints.py, drawn by torch alone: same shapes, same spread of the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.layers.linear import Linear, Weight
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import Checkpoint
from engine.parallel.group import NullGroup
from tests.harness.checkpoints import BASE, VARIANTS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def write(path: Path, variant: str) -> Path:
    kind, overrides = VARIANTS[variant]
    raw = {
        **BASE,
        **overrides,
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "dtype": "float32",
    }
    if kind == "gemma3":
        text = {**BASE, **overrides}
        raw = {key: raw[key] for key in raw if key not in text} | {"text_config": text}
    (path / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _draw(name, size, generator) for name, size in _tensors(ModelConfig.read(path))}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.empty(size).uniform_(0.6, 1.4, generator=generator)
    spread = 2.0 if name.endswith("sinks") else 1.0 if "embed" in name or "lm_head" in name else 0.2
    return torch.empty(size).normal_(0.0, spread, generator=generator)


class _Wanted(Checkpoint):
    """Takes down what a decoder reads."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[int, ...]] = {}

    def has(self, name: str) -> bool:
        return True

    def get(
        self,
        name: str,
        *shape: int,
        rows: slice | None = None,
        columns: slice | None = None,
        item: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        self.tensors[name] = shape
        whole = torch.zeros(shape) if item is None else torch.zeros(shape)[item]
        return whole[:, columns] if columns is not None else whole[rows or slice(None)]

    def matrix(
        self, name: str, *shape: int, rows: slice | None = None, columns: slice | None = None
    ) -> Tensor:
        return self.get(name, *shape, rows=rows, columns=columns)

    def head(self, name: str, *shape: int, rows: slice) -> Tensor:
        return self.get(name, *shape, rows=rows)

    def expert(
        self,
        name: str,
        count: int,
        outputs: int,
        inputs: int,
        *,
        item: int,
        rows: slice | None = None,
        columns: slice | None = None,
    ) -> Tensor:
        return self.get(name, count, inputs, outputs, item=item, rows=columns, columns=rows).t()


def _unused(weight: Weight, bias: Tensor | None, **kind: bool) -> Linear:
    return lambda x: x


def _tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    wanted = _Wanted()
    Decoder(config, wanted, NullGroup(), _unused)
    yield from wanted.tensors.items()
