"""Shares of a model's ranks: what must be divisible by their number, and the bytes of weights of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cluster.errors import ConfigError
from cluster.protocol.kv_heads import head_range
from engine.model.config import ModelConfig

MAX_SUGGESTED_RANKS = 64  # in an error message


def check_shares(model: ModelConfig, size: int, *, expert_parallel: bool = False) -> None:
    """Raise ConfigError naming the dimension that `size` ranks can't share equally, and the sizes that fit."""
    if expert_parallel and model.experts is None:
        raise ConfigError(f"expert_parallel: {model.family.title} has no experts", field="expert_parallel")
    if dimension := _indivisible(model, size, expert_parallel):
        sizes = range(1, MAX_SUGGESTED_RANKS + 1)
        fit = ", ".join(str(one) for one in sizes if not _indivisible(model, one, expert_parallel))
        whole = model.experts is not None and not expert_parallel and not _indivisible(model, size, True)
        raise ConfigError(
            f"tensor_parallel {size}: the model's {dimension} can't be shared equally; sizes that fit: {fit}"
            f"{'; with expert_parallel this one too' if whole else ''}",
            field="tensor_parallel",
        )


def _indivisible(model: ModelConfig, size: int, expert_parallel: bool) -> str:
    """The dimension that `size` ranks can't share equally, with its value; "" if there is none."""
    for key, value in _dimensions(model, expert_parallel):
        if value % size:
            return f"{key} = {value}"
    if model.experts is not None and expert_parallel and size > model.experts.count:
        return f"number of experts = {model.experts.count}"
    # With more ranks than KV heads, several ranks hold the same head.
    if model.num_kv_heads % size and size % model.num_kv_heads:
        return f"num_key_value_heads = {model.num_kv_heads}"
    return ""


def _dimensions(model: ModelConfig, expert_parallel: bool) -> Iterator[tuple[str, int]]:
    experts = model.experts
    yield "num_attention_heads", model.num_heads
    if experts is None or not all(experts.layers):
        yield "intermediate_size", model.intermediate_size
    if experts is not None:
        if not expert_parallel:
            yield experts.flags.width_key, experts.width
        if experts.shared_width:
            yield "shared experts' intermediate size", experts.shared_width
    yield "vocab_size", model.vocab_size


class Sizes(NamedTuple):
    """Sizes of one rank's weights; biases are left out."""

    matrices: int  # numbers in the layers' products
    outputs: int  # output channels of these
    kept: int  # numbers in norms and routers
    vocabulary: int  # rows of the embedding, and of the output head


def most_weights(model: ModelConfig, size: int, *, expert_parallel: bool = False) -> Sizes:
    """Sizes on the rank that has the most weights."""
    hidden, layers, experts = model.hidden_size, model.num_layers, model.experts
    first, end = head_range(0, size, model.num_kv_heads)
    heads, kv = model.num_heads // size * model.head_dim, (end - first) * model.head_dim
    # Gated MLPs, and their inner sizes together.
    mlps, inner = layers, layers * (model.intermediate_size // size)
    kept = 2 * layers
    if experts is not None:
        held = max(len(experts.held(rank, size, expert_parallel)) for rank in range(size))
        sparse = sum(experts.layers)
        mlps += (held - 1) * sparse
        inner += sparse * (
            held * (experts.width // (1 if expert_parallel else size)) - model.intermediate_size // size
        )
        if experts.shared_width:
            mlps += sparse
            inner += sparse * (experts.shared_width // size)
        kept += sparse * (experts.count + int(experts.flags.shared_gate))
    return Sizes(
        matrices=(layers * (2 * heads + 2 * kv) + 3 * inner) * hidden,
        outputs=layers * (heads + 2 * kv + hidden) + 2 * inner + mlps * hidden,
        kept=kept * hidden,
        vocabulary=model.vocab_size // size,
    )
