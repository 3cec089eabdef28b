"""The checkpoints of tests/harness/checkpoints.py, drawn by torch alone: same shapes, same spread of the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.config import ModelConfig
from tests.harness.checkpoints import BASE, VARIANTS

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
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
    (path / "config.json").write_text(json.dumps(raw))
    generator = torch.Generator().manual_seed(0)
    tensors = {name: _draw(name, size, generator) for name, size in _tensors(ModelConfig.read(path))}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.empty(size).uniform_(0.6, 1.4, generator=generator)
    spread = 1.0 if "embed" in name or "lm_head" in name else 0.2
    return torch.empty(size).normal_(0.0, spread, generator=generator)


def _tensors(c: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, dim = c.hidden_size, c.intermediate_size, c.head_dim
    q, kv = c.num_heads * dim, c.num_kv_heads * dim
    products = [
        ("self_attn.q_proj", q, hidden, c.attention_bias),
        ("self_attn.k_proj", kv, hidden, c.attention_bias),
        ("self_attn.v_proj", kv, hidden, c.attention_bias),
        ("self_attn.o_proj", hidden, q, c.output_bias),
        ("mlp.gate_proj", inner, hidden, c.mlp_bias),
        ("mlp.up_proj", inner, hidden, c.mlp_bias),
        ("mlp.down_proj", hidden, inner, c.mlp_bias),
    ]
    yield "model.embed_tokens.weight", (c.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not c.tie_embeddings:
        yield "lm_head.weight", (c.vocab_size, hidden)
    for layer in (f"model.layers.{index}" for index in range(c.num_layers)):
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if c.qk_norm:
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
        for name, outputs, inputs, bias in products:
            yield f"{layer}.{name}.weight", (outputs, inputs)
            if bias:
                yield f"{layer}.{name}.bias", (outputs,)
