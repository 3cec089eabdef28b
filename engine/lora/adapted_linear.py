"""A product to whose rows the adapters of their requests are added: y = base(x) + x Aᵀ Bᵀ."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.layers.linear import Linear
from engine.lora.adapter_files import LowRank
from engine.lora.products import Product
from engine.lora.step_rows import Rows, StepRows
from engine.ops.cpu.team import Job

JOBS = 2  # of one product's adapters


class AdaptedLinear:
    """`base` alone where no row of the step has an adapter that changes this product."""

    def __init__(
        self,
        base: Linear,
        product: Product,
        step: StepRows,
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.base = base
        self._product, self._step = product, step
        inputs = product[0].own_inputs
        begins = [sum(one.width for one in product[:at]) for at in range(len(product) + 1)]
        self._outputs = [slice(*pair) for pair in pairwise(begins)]
        # Written here, so that this memory is in use before the KV pool is sized.
        self._a = torch.empty(slots, len(product), max_rank, inputs, dtype=dtype, device=device).fill_(0)
        self._b = torch.empty(slots, max_rank, begins[-1], dtype=dtype, device=device).fill_(0)
        self._ranks = torch.zeros(slots, len(product), dtype=torch.int64)  # on the host
        self._pieces = _pieces(self._outputs) if step.team is not None else torch.empty(0, 3)

    def write(self, slot: int, layer: int, adapter: Mapping[str, LowRank]) -> None:
        """Copy this rank's share of an adapter into a slot, from 1 on; it replaces what was there."""
        begins = dict.fromkeys((part.module for part in self._product), 0)
        for at, (part, outputs) in enumerate(zip(self._product, self._outputs, strict=True)):
            found = adapter.get(f"layers.{layer}.{part.module}")
            self._ranks[slot - 1, at] = found.rank if found is not None else 0
            if found is not None:
                begin = begins[part.module]  # parts of a fused module follow each other
                begins[part.module] += part.width
                self._a[slot - 1, at, : found.rank].copy_(found.a)
                self._b[slot - 1, : found.rank, outputs].copy_(found.b[begin : begin + part.width].T)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        step = self._step
        if step.by_kernels:
            assert step.team is not None, "only a team has kernels"
            for job in self.adapter_jobs(x.data_ptr(), y.data_ptr()):
                step.team.run(*job)
        for slot, rows in step.groups:
            self._add(y, x, slot - 1, rows)
        return y

    def adapter_jobs(self, x: int, out: int) -> list[Job]:
        """Jobs that add the adapters' product to the rows at `out`, for any step that has `listed` its rows. `x`, `out`:
        addresses."""
        from engine.ops.cpu import adapters, jobs

        step, (_, parts, most, inputs) = self._step, self._a.shape
        common = (parts, most, self._ranks.data_ptr(), step.listed.data_ptr(), step.low.data_ptr())
        stride = step.low.shape[1]
        down = (x, inputs, self._a.data_ptr(), *common, stride)
        up = (out, self._b.shape[2], self._b.data_ptr(), *common, stride, self._pieces.data_ptr())
        groups = -(-most // adapters.RANKS)
        return [
            (jobs.ADAPT_DOWN, parts * groups, down),
            (jobs.ADAPT_UP, len(self._pieces), up),
        ]

    def _add(self, y: Tensor, x: Tensor, slot: int, rows: Rows) -> None:
        ranks: list[int] = self._ranks[slot].tolist()
        if not any(ranks):
            return
        own = x[rows]
        for at, (rank, outputs) in enumerate(zip(ranks, self._outputs, strict=True)):
            if not rank:
                continue
            added = F.linear(own, self._a[slot, at, :rank]) @ self._b[slot, :rank, outputs]
            if isinstance(rows, slice):
                y[rows, outputs].add_(added)
            else:
                y[:, outputs].index_add_(0, rows, added)


def _pieces(outputs: list[slice]) -> Tensor:
    """int64 [pieces, 3]: part, first output, outputs."""
    from engine.ops.cpu.adapters import PIECE

    return torch.tensor(
        [
            (part, begin, min(PIECE, own.stop - begin))
            for part, own in enumerate(outputs)
            for begin in range(own.start, own.stop, PIECE)
        ]
    )


def base_of(linear: Linear) -> Linear:
    """The product without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear
