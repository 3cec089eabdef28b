"""The model's configuration, read from a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.errors import ConfigError, ModelError
from engine.quant.formats import StoredFormat, stored_format

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
# The keys that each rope type needs.
_ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_model_len: int
    rope: dict[str, Any]
    tie_embeddings: bool
    attention_bias: bool  # q, k, v
    output_bias: bool  # o
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer; 0 = full attention
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: StoredFormat | None = None  # of stored matrices

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        """Raises ModelError naming the key."""
        try:
            raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ModelError(f"{directory}/config.json: {error}", field="config.json") from error
        try:
            found = cls._parse(directory, raw)
            found._check()
        except (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError) as error:
            raise ModelError(f"{directory}/config.json: {error!r}", field="config.json") from error
        return found

    def _check(self) -> None:
        """Raises ModelError naming the key that has no usable value."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for key in (*sizes, "head_dim", "max_model_len"):
            value = getattr(self, key)
            if type(value) is not int or not 0 < value < 2**31:
                raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: {self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads",
                field="num_key_value_heads",
            )
        if self.head_dim % 2:
            raise ModelError(
                f"config.json: head_dim is {self.head_dim}; rotary embedding needs an even one",
                field="head_dim",
            )
        eps = self.norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 < eps < 1:
            raise ModelError(
                f"config.json: rms_norm_eps is {eps!r}, not a small number", field="rms_norm_eps"
            )
        check_rope(self.rope)
        for key, values in (("eos_token_id", self.eos_token_ids), ("sliding_window", self.windows)):
            if not all(type(value) is int for value in values):
                raise ModelError(f"config.json: {key} is not a number or a list of numbers", field=key)
        if any(window < 0 for window in self.windows):
            raise ModelError("config.json: sliding_window is negative", field="sliding_window")
        if len(self.windows) != self.num_layers:
            raise ModelError(
                f"config.json: {len(self.windows)} layer_types for {self.num_layers} layers",
                field="layer_types",
            )

    @classmethod
    def _parse(cls, directory: Path, raw: dict[str, Any]) -> ModelConfig:
        name = (raw.get("architectures") or ["none"])[0]
        if name not in _FAMILIES:
            raise ModelError(
                f"architecture {name} is not supported; supported: {', '.join(_FAMILIES)}",
                field="architectures",
            )
        if raw.get("hidden_act") not in (None, "silu", "swish"):
            raise ModelError(
                f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu", field="hidden_act"
            )
        family = _FAMILIES[name]

        def need(key: str) -> Any:
            if raw.get(key) is None:
                raise ModelError(f"config.json has no {key}", field=key)
            return raw[key]

        heads = need("num_attention_heads")
        layers = need("num_hidden_layers")
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        if raw.get("partial_rotary_factor") is not None:
            rope["partial_rotary_factor"] = raw["partial_rotary_factor"]
        rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
        bias = bool(raw.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or need("hidden_size") // heads,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_model_len=raw.get("max_position_embeddings") or 2048,
            rope=rope,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=True if family == "qwen2" else bias,
            output_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            windows=_windows(raw, family, layers),
            eos_token_ids=_eos(directory, raw),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").replace("torch.", ""),
            quantization=stored_format(raw),
        )


def _windows(raw: dict[str, Any], family: str, layers: int) -> tuple[int, ...]:
    types = raw.get("layer_types") or []
    if unknown := [kind for kind in types if kind not in _LAYER_TYPES]:
        raise ModelError(
            f"layer_types: {unknown[0]!r} is not supported; supported: {', '.join(_LAYER_TYPES)}",
            field="layer_types",
        )
    window = raw.get("sliding_window") or 0
    if not window or family == "llama":
        return (0,) * layers
    if family == "mistral":
        return (window,) * layers
    if not raw.get("use_sliding_window", False):
        return (0,) * layers
    if types:
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    first = raw.get("max_window_layers", layers)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _eos(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    eos = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = json.loads(generation.read_text()).get("eos_token_id", eos)
    if eos is None:
        return ()
    vocab = raw["vocab_size"]
    # An id outside the vocabulary is never drawn; as the index of a forbidden token it would be wrong or out of bounds.
    return tuple(
        one
        for one in (eos if isinstance(eos, list) else [eos])
        if type(one) is not int or type(vocab) is not int or 0 <= one < vocab
    )


def check_rope(rope: dict[str, Any]) -> None:
    """Raise ModelError naming the key that `inverse_frequencies` does not support or misses."""
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(
            "rope_parameters differ between layers; only one setting for all layers is supported",
            field="rope_parameters",
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"partial_rotary_factor {rope['partial_rotary_factor']!r} is not supported: whole heads are rotated",
            field="partial_rotary_factor",
        )
    kind = _rope_kind(rope)
    if kind not in _ROPE_NUMBERS:
        raise ModelError(
            f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_NUMBERS)}. If it only extends the "
            f"context, remove it from config.json and set max_position_embeddings to the original length",
            field="rope_parameters.rope_type",
        )
    for key in ("rope_theta", *_ROPE_NUMBERS[kind]):
        value = rope.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(
                f"rope type {kind}: {key} is {value!r}, not a positive number", field=f"rope_parameters.{key}"
            )
    if kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        raise ModelError(
            f"rope type llama3: high_freq_factor {rope['high_freq_factor']} must be above low_freq_factor "
            f"{rope['low_freq_factor']}",
            field="rope_parameters.high_freq_factor",
        )


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] in fp32; Llama 3's scaling as in its reference code."""
    rope = config.rope
    dim = config.head_dim
    freq: torch.Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    kind = _rope_kind(rope)
    if kind == "default":
        return freq
    if kind == "linear":
        return freq / float(rope["factor"])
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    old = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freq
    scaled = torch.where(wavelength > old / low, freq / factor, freq)
    smooth = (old / wavelength - low) / (high - low)
    middle = ~(wavelength < old / high) & ~(wavelength > old / low)
    return torch.where(middle, (1 - smooth) / factor * freq + smooth * freq, scaled)


MAX_SUGGESTED_RANKS = 64  # in an error message


def check_shares(model: ModelConfig, size: int) -> None:
    """Raise ConfigError naming the dimension that `size` ranks can't share equally, and the sizes that fit."""
    if dimension := _indivisible(model, size):
        fit = ", ".join(str(one) for one in range(1, MAX_SUGGESTED_RANKS + 1) if not _indivisible(model, one))
        raise ConfigError(
            f"tensor_parallel {size}: the model's {dimension} can't be shared equally; sizes that fit: {fit}",
            field="tensor_parallel",
        )


def _indivisible(model: ModelConfig, size: int) -> str:
    """The dimension that `size` ranks can't share equally, with its value; "" if there is none."""
    for key, value in (
        ("num_attention_heads", model.num_heads),
        ("intermediate_size", model.intermediate_size),
        ("vocab_size", model.vocab_size),
    ):
        if value % size:
            return f"{key} = {value}"
    # With more ranks than KV heads, several ranks hold the same head.
    if model.num_kv_heads % size and size % model.num_kv_heads:
        return f"num_key_value_heads = {model.num_kv_heads}"
    return ""


def tables(inverse_frequencies: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    """The rotary position embedding (Su et al., RoFormer), halves form as in Llama: cos and sin, float32
    [max_len, head_dim / 2], computed once."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies)
    return angles.cos(), angles.sin()
