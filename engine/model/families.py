"""The model families that are served (family.py says what an entry holds).

A new one is an entry here if its flags exist; docs/models.md and the tests of every path take it from `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.model.family import ExpertFlags, ExpertNames, Family, Names

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
    "LlamaForCausalLM": Family("Llama", attention_bias="by key", output_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family(
        "Mistral",
        windows="all layers",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
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
        defaults={"rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": Family(
        "Granite 3",
        attention_bias="by key",
        output_bias=True,
        mlp_bias=True,
        multipliers=True,
        defaults={
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
