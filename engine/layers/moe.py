"""A mixture of experts: a router chooses a few experts for each token; rows are sorted by expert and multiplied by group.

    y ─► router ─► choose ─► sort pairs ─► gate_up by group ─► gate ─► down by group ─► in order of tokens ─► weighted sum
     └─► shared experts, times their own gate ─────────────────────────────────────────────────────────────►  +

A rank has a share of every expert, or whole experts; in both cases the results of all ranks are added by the sum that
closes every layer. All ranks choose for themselves, from the same input by the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.layers.linear import Linear, OneJobLinear
from engine.ops.moe import OneToken, Routing, Sorted, sigmoid, weighted_sum

Order = Sorted | OneToken
Activation = Callable[[Tensor], Tensor]  # [rows, 2 · inner] → [rows, inner]

# Pairs of a token and an expert that are computed together: they bound what a long prompt takes beside its activations.
MAX_PAIRS = 16_384


class Mlp:
    """One gated MLP for every token."""

    def __init__(self, gate_up: Linear, down: Linear):
        self.gate_up, self.down = gate_up, down

    def __call__(self, y: Tensor, gate: Activation) -> Tensor:
        return self.down(gate(self.gate_up(y)))


class LinearOfEach:
    """A product for each expert that has rows: in decode only their weights are read."""

    on_host = True

    def __init__(self, linears: Sequence[Linear], outputs: int):
        self._linears, self._outputs = linears, outputs

    def __call__(self, x: Tensor, order: Order) -> Tensor:
        """x [rows, in], sorted by expert → [rows, out], each row by its expert's matrix."""
        out = x.new_empty(len(x), self._outputs)
        for expert, begin, end in order.groups:
            out[begin:end] = self._linears[expert](x[begin:end])
        return out


class JobsOfEach:
    """The same by one list of jobs on a CPU, without views of rows and calls for each expert."""

    on_host = True

    def __init__(self, linears: Sequence[OneJobLinear], outputs: int):
        """`linears`: all of one team, of one size."""
        from engine.ops.cpu import jobs

        self._linears, self._outputs, self._team = linears, outputs, linears[0].team
        # Of every expert for one row: single tokens take these and fill in their addresses.
        self._single = self._team.compile([job for one in linears for job in one.jobs(1, 0, 0)])
        self._ahead = jobs.AHEAD - jobs.KERNEL
        first = jobs.ARGUMENTS - jobs.KERNEL
        self._x, self._weights, self._out = (first + at for at in (jobs.X, jobs.WEIGHTS, jobs.OUT))

    def __call__(self, x: Tensor, order: Order) -> Tensor:
        """`x`: of the team's dtype; rows of one expert are contiguous."""
        out = x.new_empty(len(x), self._outputs)
        listed = self._of_single_rows if isinstance(order, OneToken) else self._of_rows
        self._team.run_all(listed(x, out, order))
        return out

    def _of_rows(self, x: Tensor, out: Tensor, order: Order) -> NDArray[np.int64]:
        source, target = x.data_ptr(), out.data_ptr()
        source_row, target_row = (one.stride(0) * one.itemsize for one in (x, out))
        return self._team.compile(
            [
                job
                for expert, begin, end in order.groups
                for job in self._linears[expert].jobs(
                    end - begin, source + begin * source_row, target + begin * target_row
                )
            ]
        )

    def _of_single_rows(self, x: Tensor, out: Tensor, order: Order) -> NDArray[np.int64]:
        """The same where every expert has one row."""
        listed = self._single[[expert for expert, _, _ in order.groups]]
        for column, rows in ((self._x, x), (self._out, out)):
            step = rows.stride(0) * rows.itemsize
            listed[:, column] = [rows.data_ptr() + at * step for at in range(len(listed))]
        listed[:-1, self._ahead] = listed[1:, self._weights]
        listed[-1, self._ahead] = 0
        return listed


class GroupedMm:
    """The same by one operation of torch, which takes the groups' sizes from the device. Rows of experts that are not held
    come last, and are not written."""

    on_host = False

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        """`weight` [experts, out, in], `bias` [experts, out]."""
        self._weight, self._bias = weight.transpose(1, 2), bias

    def __call__(self, x: Tensor, order: Order) -> Tensor:
        assert isinstance(order, Sorted), "single tokens are sorted too: nothing waits for the device"
        ends = order.counts.cumsum(0, dtype=torch.int32)
        out: Tensor = torch._grouped_mm(x, self._weight, offs=ends)
        return out if self._bias is None else out + self._bias[order.experts()]


Products = LinearOfEach | JobsOfEach | GroupedMm


class Experts:
    """The routed experts that a rank holds."""

    def __init__(self, gate_up: Products, down: Products, held: range, count: int):
        self._gate_up, self._down = gate_up, down
        self._held, self._all = held, len(held) == count
        self._on_host = gate_up.on_host

    def __call__(self, y: Tensor, weights: Tensor, chosen: Tensor, gate: Activation) -> Tensor:
        """y [tokens, hidden]; weights and chosen [tokens, per_token]."""
        alone = self._on_host and len(y) == 1
        rows = self._of_one(y, chosen, gate) if alone else self._of_many(y, chosen, gate)
        return weighted_sum(rows, weights)

    def _of_one(self, y: Tensor, chosen: Tensor, gate: Activation) -> Tensor:
        """[per_token, hidden]. A token's experts have a row each: nothing is sorted, gathered or put back."""
        order = OneToken(chosen[0].tolist(), self._held)
        own = len(order.groups)
        if not own:
            return y.new_zeros(chosen.numel(), y.shape[1])
        out = self._down(gate(self._gate_up(y.expand(own, -1), order)), order)
        if own == chosen.numel():
            return out
        rows = y.new_zeros(chosen.numel(), y.shape[1])
        rows[order.own] = out
        return rows

    def _of_many(self, y: Tensor, chosen: Tensor, gate: Activation) -> Tensor:
        """[tokens · per_token, hidden], in the order of the tokens."""
        order = Sorted.of(chosen, self._held)
        pairs = order.own_pairs() if self._on_host else order.pairs
        shape = (chosen.numel(), y.shape[1])
        rows = y.new_empty(shape) if self._all else y.new_zeros(shape)
        if len(pairs):
            x = y[pairs // chosen.shape[1]]
            out = self._down(gate(self._gate_up(x, order)), order)
            if not self._on_host and not self._all:
                out = torch.where(order.is_own()[:, None], out, 0)
            rows[pairs] = out
        return rows


class Moe:
    """A layer's router, the experts that it chooses, and those that take every token."""

    def __init__(
        self,
        router: Linear,
        routing: Routing,
        experts: Experts,
        shared: Mlp | None,
        shared_gate: Linear | None,
    ):
        self._router, self._routing, self._experts = router, routing, experts
        self._shared, self._shared_gate = shared, shared_gate

    def __call__(self, y: Tensor, gate: Activation) -> Tensor:
        """[tokens, hidden] → what the rank's experts add to the stream."""
        together = max(1, MAX_PAIRS // self._routing.per_token)
        if len(y) <= together:
            return self._some(y, gate)
        out = torch.empty_like(y)
        for first in range(0, len(y), together):
            out[first : first + together] = self._some(y[first : first + together], gate)
        return out

    def _some(self, y: Tensor, gate: Activation) -> Tensor:
        weights, chosen = self._routing.choose(self._router(y))
        out = self._experts(y, weights, chosen, gate)
        if self._shared is None:
            return out
        shared = self._shared(y, gate)
        if self._shared_gate is not None:
            shared = sigmoid(self._shared_gate(y)) * shared
        return out.add_(shared)
