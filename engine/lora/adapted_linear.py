"""A product to whose rows the adapters of their requests are added: y = base(x) + x Aᵀ Bᵀ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from engine.layers.linear import Linear
from engine.lora.adapter_files import LowRank
from engine.lora.products import Product

Rows = slice | Tensor  # int64 indices


class StepRows:
    """The rows of a step by adapter; without adapters there are no groups, and products do nothing beside their own."""

    def __init__(self, device: torch.device):
        self._device = device
        self.groups: Sequence[tuple[int, Rows]] = ()  # slot, rows
        self.adapted_rows = 0  # since the start

    def begin(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """`slots`: of each item of the step, 0 for none; empty if no item has one. `counts`: the items' tokens."""
        if not len(slots):
            self.groups = ()
            return
        of_rows = np.repeat(slots, counts)
        self.groups = [(int(slot), self._rows(of_rows == slot)) for slot in np.unique(slots) if slot]
        self.adapted_rows += int(np.count_nonzero(of_rows))

    def _rows(self, chosen: NDArray[np.bool_]) -> Rows:
        rows = np.flatnonzero(chosen)
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows.astype(np.int64)).to(self._device)


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
        inputs = product[0].columns.stop - product[0].columns.start
        begins = [sum(one.width for one in product[:at]) for at in range(len(product) + 1)]
        self._outputs = [slice(*pair) for pair in pairwise(begins)]
        # Written here, so that this memory is in use before the KV pool is sized.
        self._a = torch.empty(slots, len(product), max_rank, inputs, dtype=dtype, device=device).fill_(0)
        self._b = torch.empty(slots, begins[-1], max_rank, dtype=dtype, device=device).fill_(0)
        self._ranks = [(0,) * len(product) for _ in range(slots)]

    def write(self, slot: int, layer: int, adapter: Mapping[str, LowRank]) -> None:
        """Copy this rank's share of an adapter into a slot, from 1 on; it replaces what was there."""
        ranks, begins = [], dict.fromkeys((part.module for part in self._product), 0)
        for at, (part, outputs) in enumerate(zip(self._product, self._outputs, strict=True)):
            found = adapter.get(f"layers.{layer}.{part.module}")
            ranks.append(found.rank if found is not None else 0)
            if found is not None:
                begin = begins[part.module]  # parts of a fused module follow each other
                begins[part.module] += part.width
                self._a[slot - 1, at, : found.rank].copy_(found.a)
                self._b[slot - 1, outputs, : found.rank].copy_(found.b[begin : begin + part.width])
        self._ranks[slot - 1] = tuple(ranks)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for slot, rows in self._step.groups:
            self._add(y, x, slot - 1, rows)
        return y

    def _add(self, y: Tensor, x: Tensor, slot: int, rows: Rows) -> None:
        ranks = self._ranks[slot]
        if not any(ranks):
            return
        own = x[rows]
        for at, (rank, outputs) in enumerate(zip(ranks, self._outputs, strict=True)):
            if not rank:
                continue
            added = F.linear(F.linear(own, self._a[slot, at, :rank]), self._b[slot, outputs, :rank])
            if isinstance(rows, slice):
                y[rows, outputs].add_(added)
            else:
                y[:, outputs].index_add_(0, rows, added)


def base_of(linear: Linear) -> Linear:
    """The product without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear
