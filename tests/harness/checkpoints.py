"""Small random checkpoints of every family, with references whose greedy output is not trivial.

Default-initialised models repeat one token; these are drawn with larger weights, and a seed is taken only if its
reference has enough distinct tokens. VARIANTS are known without transformers: machines with a CUDA card may lack it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.harness.model_text import BASE, CONTEXT, VOCAB, write_tokenizer

WINDOW = 24
PROMPT = 70  # longer than the sliding window
MIN_DISTINCT = 16
NEW_TOKENS = 64

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0], "long_factor": [1.5, 2.0, 2.5, 3.5, 5.0, 8.0]}
_PHI4 = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}  # 12 of 16 dimensions
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "tie_word_embeddings": True}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


# The smallest part for pictures that there can be; it is neither loaded nor served.
_NO_PICTURES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}


def _longrope(original: int) -> dict[str, Any]:
    """Hugging Face rotates a text by the long factors from `original` + 1 tokens on: here 4, or never."""
    return {
        **_PHI4,
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "partial_rotary_factor": 0.75,
            **_FACTORS,
        },
    }


# Head widths are those of other variants: kernels are compiled for each.
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
_QWEN2_MOE = {**_MOE, "num_experts": 8, "shared_expert_intermediate_size": 48}
# A limit that most clamps reach here, and the default rope type: yarn, without `truncate`
_GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "swiglu_alpha": 1.3,
    "swiglu_limit": 1.5,
}
_GLM_MOE = {**_MOE, "n_routed_experts": 8}

# name → (model type, overrides)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-rope-scaled-biases": (
        "llama",
        {"rope_parameters": _LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": WINDOW, "head_dim": 32}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "phi3-window": ("phi3", {"sliding_window": WINDOW}),
    "phi4": ("phi3", _PHI4),
    "phi3-short-factors": ("phi3", _longrope(CONTEXT)),
    "phi3-long-factors": ("phi3", _longrope(4)),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-mqa": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "granite": (
        "granite",
        {
            "rms_norm_eps": 0.05,  # large: it takes part in the multipliers' arithmetic
            "embedding_multiplier": 6.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
        },
    ),
    "granite-plain-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4-plain": ("glm4", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "gemma2": ("gemma2", {**_GEMMA, "attn_logit_softcapping": 12.0, "final_logit_softcapping": 10.0}),
    "gemma2-uncapped-biases": (
        "gemma2",
        {
            **_GEMMA,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GEMMA,
            "rope_parameters": _GEMMA3_ROPE,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3-multimodal": ("gemma3", {**_GEMMA, "head_dim": 32}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral-window-fused": (
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW, "head_dim": 32},
    ),
    "qwen2-moe": ("qwen2_moe", _QWEN2_MOE),
    "qwen2-moe-normed-steps-window": (
        "qwen2_moe",
        {
            **_QWEN2_MOE,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
    "qwen3-moe": ("qwen3_moe", {**_MOE, "num_experts": 8, "norm_topk_prob": True, "head_dim": 32}),
    "qwen3-moe-fused-biases": (
        "qwen3_moe",
        {**_MOE, "num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "glm4-moe": ("glm4_moe", {**_GLM_MOE, "n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "glm4-moe-plain-biases": (
        "glm4_moe",
        {
            **_GLM_MOE,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "n_shared_experts": 2,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "partial_rotary_factor": 1.0,
        },
    ),
    "gpt-oss": ("gpt_oss", _GPT_OSS),
    "gpt-oss-plain-mqa": (
        "gpt_oss",
        {
            **_GPT_OSS,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
FUSED = ("mixtral-window-fused", "qwen3-moe-fused-biases")  # all experts of a layer in one tensor


def _is_mixture(kind: str) -> bool:
    return "moe" in kind or kind in ("mixtral", "gpt_oss")


EXPERTS = tuple(name for name, (kind, _) in VARIANTS.items() if _is_mixture(kind))
# The families of the first engine, which `make test` takes through every path; of the others, those that have most flags,
# through one path (CHECKED). The rest is long.
FIRST = tuple(VARIANTS)[: tuple(VARIANTS).index("llama-yarn")]
CHECKED = (
    *FIRST,
    *("phi3-long-factors", "olmo2", "granite", "glm4", "gemma2", "gemma3"),
    *("qwen2-moe", "glm4-moe", "gpt-oss"),
)


def variants(short: Sequence[str] = FIRST, without: Sequence[str] = ()) -> list[Any]:
    """All variants, as parameters of a test; those that are not in `short` are marked long."""
    import pytest

    return [
        name if name in short else pytest.param(name, marks=pytest.mark.long)
        for name in VARIANTS
        if name not in without
    ]


def prompt_ids(length: int = PROMPT, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def make_checkpoint(path: Path, variant: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with tokenizer and chat template into `path`, its weights rounded to `dtype`."""
    kind, overrides = VARIANTS[variant]
    for seed in range(50):
        model = _random_model(kind, overrides, seed)
        if len(set(_greedy(model, prompt_ids(), NEW_TOKENS))) >= MIN_DISTINCT:
            break
    else:
        raise AssertionError(f"no seed gives {variant} a reference worth comparing with")
    model.to(dtype).save_pretrained(path, save_original_format=variant not in FUSED)
    write_tokenizer(path)
    return path


def _random_model(kind: str, overrides: dict[str, Any], seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {**BASE, **overrides}
    if kind == "gemma3":
        settings = {"text_config": settings, "vision_config": _NO_PICTURES}
    config = AutoConfig.for_model(kind, **settings)
    model = AutoModelForCausalLM.from_config(config, **_experts(kind)).float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # Gemma's multiply by 1 + w
                least = -0.4 if kind.startswith("gemma") else 0.6
                parameter.uniform_(least, least + 0.8)
            elif "embed" in name or "lm_head" in name:
                # Gemma's are multiplied by 8: tied ones that are larger repeat the last token.
                parameter.normal_(0.0, 0.04 if kind.startswith("gemma") else 1.0)
            else:  # sinks are as large as scores
                parameter.normal_(0.0, 2.0 if name.endswith("sinks") else 0.2)
    return model


def _experts(kind: str) -> dict[str, str]:
    """The library's plain loop over experts: the only form of theirs that computes in float64."""
    return {"experts_implementation": "eager"} if _is_mixture(kind) else {}


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@functools.cache
def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = AutoConfig.from_pretrained(path).model_type
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **_experts(kind)).eval()


def reference_greedy(path: Path, prompt: list[int], count: int) -> list[int]:
    """Hugging Face's greedy continuation in fp32; end-of-sequence is ignored."""
    return list(_reference_greedy(path, tuple(prompt), count))


@functools.cache
def _reference_greedy(path: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    return _greedy(reference_model(path), list(prompt), count)


@torch.inference_mode()
def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] teacher-forced."""
    logits: torch.Tensor = reference_model(path)(torch.tensor([tokens])).logits[0]
    return logits


@torch.inference_mode()
def gate_gaps(path: Path, tokens: list[int]) -> list[float]:
    """Of each token, the smallest distance in any layer between the gate of the last expert that it takes and that of the
    best one that it does not; infinite in a model without experts."""
    gaps = torch.full((len(tokens),), torch.inf)

    def gap(values: torch.Tensor, count: int) -> None:
        if count < values.shape[-1]:
            best = values.topk(count + 1).values
            torch.minimum(gaps, best[:, -2] - best[:, -1], out=gaps)

    def look(router: Any, _: Any, output: Any) -> None:
        logits = output[0].float().view(len(tokens), -1)
        bias = getattr(router, "e_score_correction_bias", None)
        gates = logits.softmax(-1) if bias is None else logits.sigmoid() + bias
        if (groups := getattr(router, "num_group", 1)) > 1:
            of_groups = gates.view(len(tokens), groups, -1)
            judged = of_groups.topk(2).values.sum(-1)
            gap(judged, router.topk_group)
            last = judged.topk(router.topk_group).values[:, -1:]
            gates = of_groups.masked_fill((judged < last)[..., None], -torch.inf).flatten(1)
        gap(gates, router.top_k)

    model = reference_model(path)
    routers = [one for one in model.modules() if type(one).__name__.lower().endswith("topkrouter")]
    hooks = [one.register_forward_hook(look) for one in routers]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return [float(gap) for gap in gaps]


@torch.inference_mode()
def exact_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """The same in float64, but for the norms and the rotary tables, which Hugging Face always takes in fp32."""
    logits: torch.Tensor = reference_model(path, torch.float64)(torch.tensor([tokens])).logits[0]
    return logits
