"""Which tensor-parallel sizes fit a model."""

from __future__ import annotations

from cluster.errors import ConfigError
from engine.model.config import ModelConfig

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
