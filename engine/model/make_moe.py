"""A layer's mixture of experts, made from the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from engine.layers.linear import Linear, MakeLinear, OneJobLinear, TorchLinear
from engine.layers.moe import Experts, GroupedMm, JobsOfEach, LinearOfEach, Mlp, Moe, Products
from engine.model.expert_weights import ExpertWeights
from engine.model.experts import ExpertConfig
from engine.ops.moe import Routing

log = logging.getLogger(__name__)


def make_moe(config: ExpertConfig, weights: ExpertWeights, linear: MakeLinear) -> Moe:
    router, correction = weights.router(), weights.correction()
    fp32 = config.flags.scores == "sigmoid"
    product = _in_fp32(router) if fp32 else linear(router, weights.router_bias())
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
    def products(get: Callable[[int], Tensor], bias_of: Callable[[int], Tensor | None]) -> Products:
        first = get(held.start)
        biases = [bias_of(one) for one in held]
        if not grouped_works(first.device, first.dtype, *first.shape):
            others = (linear(get(one), bias) for one, bias in zip(held[1:], biases[1:], strict=True))
            each = [linear(first, biases[0]), *others]
            return _of_each(each, len(first))
        stacked = first.new_empty(len(held), *first.shape)
        for index, one in enumerate(held):
            stacked[index] = get(one)
        added = [one for one in biases if one is not None]  # of all experts or of none
        return GroupedMm(stacked, torch.stack(added) if added else None)

    held = weights.held
    gate_up = products(weights.gate_up, weights.gate_up_bias)
    return Experts(gate_up, products(weights.down, weights.down_bias), held, config.count)


def _of_each(linears: Sequence[Linear], outputs: int) -> Products:
    by_jobs = [one for one in linears if isinstance(one, OneJobLinear)]
    return JobsOfEach(by_jobs, outputs) if len(by_jobs) == len(linears) else LinearOfEach(linears, outputs)


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
