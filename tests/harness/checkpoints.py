"""Small random checkpoints of every family, with references whose greedy output is not trivial.

Default-initialised models repeat one token; these are drawn with larger weights, and a seed is taken only if its
reference has enough distinct tokens. VARIANTS are known without transformers: machines with a CUDA card may lack it.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import torch

from tests.harness.model_text import BASE, VOCAB, write_tokenizer

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
}


def prompt_ids(length: int = PROMPT, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def make_checkpoint(path: Path, variant: str = "llama") -> Path:
    """Writes a float32 checkpoint with tokenizer and chat template into `path`."""
    kind, overrides = VARIANTS[variant]
    for seed in range(50):
        model = _random_model(kind, overrides, seed)
        if len(set(_greedy(model, prompt_ids(), NEW_TOKENS))) >= MIN_DISTINCT:
            break
    else:
        raise AssertionError(f"no seed gives {variant} a reference worth comparing with")
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def _random_model(kind: str, overrides: dict[str, Any], seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**BASE, **overrides})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.6, 1.4)
            elif "embed" in name or "lm_head" in name:
                parameter.normal_(0.0, 1.0)
            else:
                parameter.normal_(0.0, 0.2)
    return model


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
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


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
def exact_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """The same in float64, but for the norms and the rotary tables, which Hugging Face always takes in fp32."""
    logits: torch.Tensor = reference_model(path, torch.float64)(torch.tensor([tokens])).logits[0]
    return logits
