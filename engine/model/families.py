"""Model families: what distinguishes each from Llama, as flags and a map of tensor names.

A new one is an entry here if its flags exist; docs/models.md and the tests of every path take it from `FAMILIES`.
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
    """What distinguishes the families' mixtures of experts; sizes and the rest are keys (experts.py)."""

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
        """Of config.json, or of its text_config: those that are read."""
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
_QWEN = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_GEMMA_NAMES = Names(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_GEMMA = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
_GEMMA2 = Family(
    "Gemma 2",
    names=_GEMMA_NAMES,
    attention_bias="by key",
    output_bias=True,
    windows="layer_types",
    window_every=2,
    norm_offset=True,
    scaled_embedding=True,
    soft_caps=True,
    activation_key="hidden_activation",
    defaults={
        **_GEMMA,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    # Early checkpoints name the activation a second time, which is not read.
    fixed={"use_bidirectional_attention": None, "hidden_act": "gelu_pytorch_tanh"},
)
_GEMMA3_DEFAULTS = {
    **_GEMMA,
    "rope_local_base_freq": 10_000.0,
    "rope_theta": 1_000_000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
}


def _gemma3(title: str) -> Family:
    return Family(
        title,
        names=_GEMMA_NAMES,
        attention_bias="by key",
        output_bias=True,
        qk_norm="head",
        windows="layer_types",
        norm_offset=True,
        local_rope=True,
        scaled_embedding=True,
        soft_caps=True,
        activation_key="hidden_activation",
        defaults=_GEMMA3_DEFAULTS,
        # Hugging Face reads the cap of scores, and does not apply it.
        fixed={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
    )


# By the architecture that config.json names.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "Llama", attention_bias="by key", output_bias=True, mlp_bias=True, defaults={"eos_token_id": 2}
    ),
    "MistralForCausalLM": Family(
        "Mistral",
        windows="all layers",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "eos_token_id": 2},
    ),
    "Qwen2ForCausalLM": Family(
        "Qwen2", attention_bias="always", windows="last layers", defaults=_QWEN, fixed={"use_mrope": False}
    ),
    "Qwen3ForCausalLM": Family(
        "Qwen3",
        attention_bias="by key",
        output_bias=True,
        qk_norm="head",
        windows="last layers",
        defaults={**_QWEN, "head_dim": 128},
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        names=Names(
            qkv=("self_attn.qkv_proj",) * 3,
            gate_up=("mlp.gate_up_proj",) * 2,
        ),
        windows="all layers",
        partial_rotary=True,
        older_longrope=True,
        defaults={
            "eos_token_id": 32000,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "sliding_window": None,
        },
        # Phi-4-mini's, which Hugging Face's code does not read.
        fixed={"full_attn_mod": 1, "interpolate_factor": 1},
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2",
        names=Names(
            attention_in=None,
            attention_out="post_attention_layernorm",
            mlp_in=None,
            mlp_out="post_feedforward_layernorm",
        ),
        attention_bias="by key",
        output_bias=True,
        qk_norm="row",
        defaults={"eos_token_id": 50279, "rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": Family(
        "Granite 3",
        attention_bias="by key",
        output_bias=True,
        mlp_bias=True,
        multipliers=True,
        defaults={
            "eos_token_id": 2,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
    ),
    "Glm4ForCausalLM": Family(
        "GLM-4",
        names=Names(
            gate_up=("mlp.gate_up_proj",) * 2,
            attention_out="post_self_attn_layernorm",
            mlp_in="post_attention_layernorm",
            mlp_out="post_mlp_layernorm",
        ),
        attention_bias="by key",
        interleaved_rope=True,
        partial_rotary=True,
        defaults={
            "eos_token_id": [151329, 151336, 151338],
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1.5625e-07,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "MixtralForCausalLM": Family(
        "Mixtral",
        windows="all layers",
        experts=ExpertFlags(
            ExpertNames(blocks=("block_sparse_moe", "mlp"), parts=("w1", "w3", "w2")),
            normed="always",
            count_keys=("num_local_experts", "num_experts"),
            width_key="intermediate_size",
        ),
        defaults={
            "eos_token_id": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        ignored=frozenset({"router_jitter_noise"}),  # training
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen2-MoE",
        attention_bias="by key",
        bias_key="qkv_bias",
        windows="even layers",
        experts=ExpertFlags(
            ExpertNames(shared="shared_expert"), rounded=True, shared_gate=True, layers="by step"
        ),
        defaults={
            **_QWEN,
            **_QWEN_EXPERTS,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        fixed={"use_mrope": False},
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE",
        attention_bias="by key",
        output_bias=True,
        qk_norm="head",
        windows="all layers",
        experts=ExpertFlags(rounded=True, layers="by step"),
        defaults={
            **_QWEN_EXPERTS,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
        ignored=frozenset({"max_window_layers"}),
    ),
    "Glm4MoeForCausalLM": Family(
        "GLM-4.5, GLM-4.6",
        attention_bias="by key",
        qk_norm="head",
        qk_norm_key="use_qk_norm",
        partial_rotary=True,
        experts=ExpertFlags(
            ExpertNames(shared="shared_experts"),
            scores="sigmoid",
            count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
            layers="after the first",
        ),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        # Layers that predict further tokens, for speculation
        ignored=frozenset({"num_nextn_predict_layers", "num_mtp_layers"}),
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss",
        attention_bias="by key",
        output_bias=True,
        windows="layer_types",
        window_every=2,
        sinks=True,
        clamped_swiglu=True,
        experts=ExpertFlags(
            ExpertNames(router="router"),
            scores="softmax of chosen",
            biases=True,
            interleaved=True,
            count_keys=("num_local_experts", "num_experts"),
            width_key="intermediate_size",
        ),
        stored_dtype="bfloat16",
        defaults={
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        fixed={"hidden_act": "silu"},
        # Second names of num_experts_per_tok and of the rope setting's original length, which Hugging Face does not read
        ignored=frozenset({"experts_per_token", "initial_context_length"}),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _gemma3("Gemma 3"),
    "Gemma3ForConditionalGeneration": _gemma3("Gemma 3, text of a multimodal model"),
}
# Keys beside text_config, of models for several media: they say how other parts enter the text, and none is served.
WRAPPER_KEYS = frozenset({
    "text_config", "vision_config", "audio_config", "boi_token_index", "eoi_token_index", "image_token_index",
    "mm_tokens_per_image", "tie_word_embeddings", "quantization_config", "compression_config",
})  # fmt: skip
