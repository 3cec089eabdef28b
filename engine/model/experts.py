"""A model's mixture of experts, read from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from cluster.errors import ModelError
from engine.model.family import ExpertFlags


@dataclass(frozen=True)
class ExpertConfig:
    flags: ExpertFlags
    count: int
    per_token: int
    width: int  # inner size of an expert
    shared_width: int  # of the experts that take every token, together; 0: there are none
    layers: tuple[bool, ...]  # whether a layer has experts, or one MLP
    normed: bool  # the weights of a token's experts add up to 1
    groups: int = 1  # of which a token's experts come from `kept_groups`, those with the best experts
    kept_groups: int = 1
    scale: float = 1.0  # of the routed experts' weights

    def held(self, rank: int, size: int, whole: bool) -> range:
        """The experts of which a rank has weights: `whole` ones, or its share of every one."""
        if not whole:
            return range(self.count)
        return range(self.count * rank // size, self.count * (rank + 1) // size)


def read(given: Collection[str], get: Callable[[str], Any], flags: ExpertFlags, layers: int) -> ExpertConfig:
    """`given`: the keys that the configuration has; `get` returns a key's value or its default. Raises ModelError naming
    the key."""

    def number(key: str, least: int = 1) -> int:
        value = get(key)
        if type(value) is not int or not least <= value < 2**31:
            raise ModelError(f"config.json: {key} is {value!r}, not a number from {least} on", field=key)
        return value

    count_key = next((key for key in flags.count_keys if key in given), flags.count_keys[0])
    count, per_token = number(count_key), number("num_experts_per_tok")
    if per_token > count:
        raise ModelError(
            f"config.json: num_experts_per_tok is {per_token}, the model has {count} experts",
            field="num_experts_per_tok",
        )
    groups, kept, scale = 1, 1, 1.0
    if flags.scores == "sigmoid":
        groups, kept = number("n_group"), number("topk_group")
        scale = _positive(get, "routed_scaling_factor")
        _check_groups(count, per_token, groups, kept)
    width = number(flags.width_key)
    shared = 0
    if flags.names.shared == "shared_expert":
        shared = number("shared_expert_intermediate_size")
    elif flags.names.shared:
        shared = width * number("n_shared_experts")
    return ExpertConfig(
        flags=flags,
        count=count,
        per_token=per_token,
        width=width,
        shared_width=shared,
        layers=_layers(get, number, flags, layers),
        normed=flags.normed == "always" or bool(get("norm_topk_prob")),
        groups=groups,
        kept_groups=kept,
        scale=scale,
    )


def _positive(get: Callable[[str], Any], key: str) -> float:
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**31:
        raise ModelError(f"config.json: {key} is {value!r}, not a positive number", field=key)
    return float(value)


def _check_groups(count: int, per_token: int, groups: int, kept: int) -> None:
    # A group is judged by its two best experts.
    if count % groups or count // groups < 2:
        raise ModelError(
            f"config.json: {count} experts can't be {groups} groups of two or more", field="n_group"
        )
    if kept > groups or kept * (count // groups) < per_token:
        raise ModelError(
            f"config.json: topk_group {kept} of {groups} groups leaves a token fewer than {per_token} experts",
            field="topk_group",
        )


def _layers(
    get: Callable[[str], Any], number: Callable[..., int], flags: ExpertFlags, layers: int
) -> tuple[bool, ...]:
    if flags.layers == "after the first":
        first = number("first_k_dense_replace", 0)
        return tuple(layer >= first for layer in range(layers))
    if flags.layers == "all":
        return (True,) * layers
    step, dense = number("decoder_sparse_step"), get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(one) is int for one in dense):
        raise ModelError("config.json: mlp_only_layers is not a list of numbers", field="mlp_only_layers")
    without = frozenset(dense)
    return tuple((layer + 1) % step == 0 and layer not in without for layer in range(layers))
