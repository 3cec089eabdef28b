"""A layer's mixture of experts, made from the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engine.layers.linear import Linear, MakeLinear, TorchLinear
from engine.layers.moe import Experts, GroupedMm, LinearOfEach, Mlp, Moe
from engine.model.expert_weights import ExpertWeights
from engine.model.experts import ExpertConfig
from engine.ops.moe import Routing

log = logging.getLogger(__name__)


def make_moe(config: ExpertConfig, weights: ExpertWeights, linear: MakeLinear) -> Moe:
    router, correction = weights.router(), weights.correction()
    product = linear(router, None) if config.flags.scores == "softmax" else _in_fp32(router)
    routing = Routing(
        config.per_token,
        config.flags.scores,
        config.normed,
        config.flags.rounded,
        correction,
        config.groups,
        config.kept_groups,
        config.scale,
    )
    shared = shared_gate = None
    if config.shared_width:
        shared = Mlp(linear(weights.shared_gate_up(), None), linear(weights.shared_down(), None))
        shared_gate = linear(weights.shared_gate(), None) if config.flags.shared_gate else None
    return Moe(product, routing, _experts(config, weights, linear), shared, shared_gate)


def _in_fp32(weight: Tensor) -> Linear:
    product = TorchLinear(weight)
    return lambda x: product(x.float())


def _experts(config: ExpertConfig, weights: ExpertWeights, linear: MakeLinear) -> Experts:
    def products(get: Callable[[int], Tensor]) -> LinearOfEach | GroupedMm:
        first = get(held.start)
        if not grouped_works(first.device, first.dtype, *first.shape):
            others = (linear(get(one), None) for one in held[1:])
            return LinearOfEach([linear(first, None), *others], len(first))
        stacked = first.new_empty(len(held), *first.shape)
        for index, one in enumerate(held):
            stacked[index] = get(one)
        return GroupedMm(stacked)

    held = weights.held
    return Experts(products(weights.gate_up), products(weights.down), held, config.count)


@cache
def grouped_works(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Whether experts of this size are multiplied by torch's grouped product, which needs rows of a multiple of 16 bytes.
    On CPUs their own products are faster in decode: their weights are packed."""
    if device.type != "cuda":
        return False
    try:
        x = torch.zeros(16, inputs, device=device, dtype=dtype)
        ends = torch.tensor([8, 16], dtype=torch.int32, device=device)
        weights = torch.zeros(2, outputs, inputs, device=device, dtype=dtype)
        torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    except (RuntimeError, AttributeError) as error:
        log.warning("experts are multiplied one by one: torch has no grouped product here (%s)", error)
        return False
    return True
