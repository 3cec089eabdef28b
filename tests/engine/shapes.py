"""Shapes of published models, without their weights."""

from __future__ import annotations

from engine.model.config import ModelConfig
from engine.model.families import FAMILIES


def shape(
    layers: int,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    vocab: int = 128_256,
    length: int = 131_072,
    *,
    dim: int = 128,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        family=FAMILIES["LlamaForCausalLM"],
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=1e-5,
        max_model_len=length,
        rope={"rope_theta": 500_000.0},
        tie_embeddings=tied,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        windows=(0,) * layers,
        eos_token_ids=(),
        dtype="bfloat16",
    )


# Their config.json: layers, hidden size, intermediate size, heads, KV heads.
SHAPES = {
    "llama-3.2-1b-instruct": shape(16, 2048, 8192, 32, 8, dim=64, tied=True),
    "llama-3.1-8b-instruct": shape(32, 4096, 14_336, 32, 8),
    "llama-3.1-70b-instruct": shape(80, 8192, 28_672, 64, 8),
    "llama-3.1-405b-instruct": shape(126, 16_384, 53_248, 128, 8),
    "qwen2.5-32b-instruct": shape(64, 5120, 27_648, 40, 8, 152_064, 32_768),
}
# Bytes of their checkpoints in bf16, from the index files' metadata.total_size.
PUBLISHED_BYTES = {
    "llama-3.1-8b-instruct": 16_060_522_496,
    "llama-3.1-70b-instruct": 141_107_412_992,
    "qwen2.5-32b-instruct": 65_527_752_704,
}
