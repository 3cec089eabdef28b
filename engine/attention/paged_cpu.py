"""Attention on the CPU: single tokens by a kernel that reads the blocks where they lie, prompts by products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.attention.sdpa import SdpaBackend
from engine.ops import cpu_kernels as kernels
from engine.ops.team import Team
from engine.plan import PlanItem

# Of KV read in one layer: below it the helpers' waking costs more than they spare.
WORTH_SHARING_BYTES = 1 << 20


class PagedCpuBackend(SdpaBackend):
    name = "cpu"
    takes_tokens_apart = True

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, team: Team):
        super().__init__(shape, kv_cache, team)
        self._kind = kernels.kind_of(kv_cache.dtype)
        self._dim8 = (0,) * (shape.head_dim // 8)
        self._rows = self._ends = self._tables = torch.empty(0, dtype=torch.int64)
        self._worth = False

    def begin(self, items: Sequence[PlanItem]) -> None:
        super().begin(items)
        single = self._tokens
        width = max((-(-item.end // self._shape.page_size) for _, item in single), default=0)
        self._rows = torch.tensor([row for row, _ in single], dtype=torch.int64)
        self._ends = torch.tensor([item.end for _, item in single], dtype=torch.int64)
        tables = [item.block_ids[:width] + [0] * (width - len(item.block_ids)) for _, item in single]
        self._tables = torch.tensor(tables, dtype=torch.int64)
        per_token = 2 * self._shape.num_kv_heads * self._shape.head_dim * self._cache.element_size()
        self._worth = int(self._ends.sum()) * per_token > WORTH_SHARING_BYTES

    def _attend_tokens(self, layer: int, q: Tensor, out: Tensor) -> None:
        if not len(self._rows):
            return
        s, cache, tables = self._shape, self._cache, self._tables
        queries, to = q.data_ptr(), out.data_ptr()
        rows, blocks, ends = self._rows.data_ptr(), tables.data_ptr(), self._ends.data_ptr()

        def items(first: int, last: int) -> None:
            kernels.attend_tokens(
                self._kind, queries, q.stride(0), to, rows, blocks, tables.shape[1], ends, first, last,
                cache.data_ptr(), layer * cache.stride(1), cache.stride(0), s.num_kv_heads, self._group,
                s.page_size, self._dim8, s.windows[layer], self._scale,
            )  # fmt: skip

        self._team.split(len(self._rows), items, worth=self._worth)
