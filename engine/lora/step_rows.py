"""Which rows of a step have which adapter, in the forms that the products read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team

MAX_ROWS = 256  # of a step that kernels compute, which lists of jobs (engine/decode_jobs) are made for
Rows = slice | Tensor  # int64 indices


class StepRows:
    """The rows of a step by adapter; without adapters there are none, and products do nothing beside their own.

    Steps of single tokens are `listed` for the CPU's kernels (engine/ops/cpu/), in memory that stays where it is.
    Other steps, whose adapters have many rows each, are `groups` for products by torch.
    """

    def __init__(self, device: torch.device, team: Team | None = None, low_width: int = 0):
        """`low_width`: numbers of a row between the two products of an adapter."""
        self._device = device
        self.team = team if isinstance(team, KernelTeam) else None
        most = MAX_ROWS if self.team is not None else 0
        # How many, then row and slot (from 0 on) of each
        self.listed = torch.zeros(1 + 2 * most, dtype=torch.int64)
        self.low = torch.zeros(most, low_width)
        self.by_kernels = False
        self.groups: Sequence[tuple[int, Rows]] = ()  # slot, rows
        self.adapted_rows = 0  # since the start

    def begin(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """`slots`: of each item of the step, 0 for none; empty if no item has one. `counts`: the items' tokens."""
        self.groups, self.by_kernels = (), False
        if not len(slots):
            return
        if self.team is not None and len(slots) <= MAX_ROWS and counts.max() == 1:
            self.by_kernels = True
            self._list(slots)
            return
        of_rows = np.repeat(slots, counts)
        self.groups = [(int(slot), self._rows(of_rows == slot)) for slot in np.unique(slots) if slot]
        self.adapted_rows += int(np.count_nonzero(of_rows))

    def _list(self, slots: NDArray[np.int32]) -> None:
        order = np.argsort(slots, kind="stable")
        rows = order[np.count_nonzero(slots == 0) :]
        listed, count = self.listed.numpy(), len(rows)
        listed[0] = count
        listed[1 : 1 + 2 * count : 2], listed[2 : 2 + 2 * count : 2] = rows, slots[rows] - 1
        self.adapted_rows += count

    def _rows(self, chosen: NDArray[np.bool_]) -> Rows:
        rows = np.flatnonzero(chosen)
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            return slice(first, last + 1)
        return torch.from_numpy(rows.astype(np.int64)).to(self._device)


def kernel_bytes(low_width: int) -> int:
    """Bytes of what the CPU's kernels read and write beside the adapters."""
    return (1 + 2 * MAX_ROWS) * 8 + MAX_ROWS * low_width * 4
