"""Differences of a model family from Llama: a map of tensor names, flags, and the keys of config.json that it reads.

Flags are resolved when a model is loaded: most become another order of rows or another scale of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SILU, GELU_TANH, CLAMPED_SWIGLU = "silu", "gelu_tanh", "clamped_swiglu"
# Hugging Face's names of them.
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}


@dataclass(frozen=True)
class Names:
    """Names of a layer's tensors below `layers.N.`, without `.weight`. None: the family has no such norm.

    Several products of one input under one name are rows of one tensor, one after the other.
    """

    qkv: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up: tuple[str, str] = ("mlp.gate_proj", "mlp.up_proj")
    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None  # of what attention adds to the stream
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's experts below `layers.N.`: each expert's matrices, or all experts' in one tensor of three
    dimensions, which newer checkpoints have in the first block of the same names."""

    # Where the router and the experts are: the first of these that a checkpoint has.
    blocks: tuple[str, ...] = ("mlp",)
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "gate"
    shared: str = ""  # below the block, of the experts that take every token; "": there are none


@dataclass(frozen=True)
class ExpertFlags:
    """Differences between the families' mixtures of experts; sizes and the rest are keys (experts.py)."""

    names: ExpertNames = ExpertNames()
    # sigmoid: with a correction, by groups of experts; softmax of chosen: over the logits of the chosen experts only
    scores: Literal["softmax", "sigmoid", "softmax of chosen"] = "softmax"
    normed: Literal["always", "by key"] = "by key"  # the weights of a token's experts add up to 1
    rounded: bool = False  # those weights, to the dtype of the products
    shared_gate: bool = False  # of the shared experts' output
    biases: bool = False  # of the router and of the experts' products
    # One tensor for all experts of a layer, inputs before outputs unless in MXFP4; gate and up are interleaved (gpt-oss).
    interleaved: bool = False
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    width_key: str = "moe_intermediate_size"
    layers: Literal["all", "by step", "after the first"] = "all"


@dataclass(frozen=True)
class Family:
    """`defaults`: Hugging Face's, of keys that are read; those that routers read too are in cluster/protocol/model_limits.
    `fixed`: keys of which only this value, theirs, is computed."""

    title: str
    names: Names = Names()
    attention_bias: Literal["never", "by key", "always"] = "never"  # of q, k, v
    bias_key: str = "attention_bias"
    output_bias: bool = False  # `attention_bias` adds one to the output product too
    mlp_bias: bool = False  # by the key `mlp_bias`
    qk_norm: Literal["", "head", "row"] = ""  # of each head, or of all heads of a token at once
    qk_norm_key: str = ""  # which says whether a model has it; "": all have
    windows: Literal["none", "all layers", "last layers", "even layers", "layer_types"] = "none"
    window_every: int = 0  # without layer_types: each layer but every so many-th has a window
    sinks: bool = False  # attention sinks: a learned logit per head beside the scores of each softmax
    norm_offset: bool = False  # norms multiply by 1 + w
    interleaved_rope: bool = False  # neighbours are rotated against each other, not halves
    partial_rotary: bool = False  # by a key, a part of each head
    older_longrope: bool = False  # "su" and "yarn" are early names of longrope
    local_rope: bool = False  # window layers rotate by a setting of their own
    scaled_embedding: bool = False  # by the root of the hidden size, in the dtype of the weights
    multipliers: bool = False  # Granite's four
    soft_caps: bool = False  # of attention scores and logits, by keys
    clamped_swiglu: bool = False  # gate and up are clamped, by keys; `activation_key` has one allowed value
    activation_key: str = "hidden_act"
    experts: ExpertFlags | None = None
    stored_dtype: str = "float32"  # of checkpoints whose config.json has no `dtype`
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()  # keys that checkpoints have and that change nothing in this family

    @property
    def keys(self) -> frozenset[str]:
        """The keys of config.json, or of its text_config, that are read."""
        read = {*_READ, *self.defaults} | ({self.activation_key} - self.fixed.keys())
        read |= {self.bias_key} if self.attention_bias == "by key" else set()
        read |= {"mlp_bias"} if self.mlp_bias else set()
        read |= set(self.experts.count_keys) if self.experts else set()
        return frozenset(read | _WINDOW_KEYS[self.windows] | self.ignored)

    def default(self, key: str) -> Any:
        return self.defaults.get(key, _DEFAULTS.get(key))


_READ = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "layer_types",
    "quantization_config", "compression_config",
})  # fmt: skip


_WINDOW_KEYS: Mapping[str, set[str]] = {
    "none": set(),
    "all layers": {"sliding_window"},
    "last layers": {"sliding_window", "use_sliding_window", "max_window_layers"},
    "even layers": {"sliding_window", "use_sliding_window", "max_window_layers"},
    "layer_types": {"sliding_window"},
}


_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
}
