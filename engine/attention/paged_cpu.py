"""Attention on the CPU: single tokens by a kernel that reads the blocks in place; prompts by matrix products, or in bf16
on CPUs with an instruction for it by a kernel (engine/ops/cpu_prompts), in half the time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionShape
from engine.attention.sdpa import Piece, SdpaBackend
from engine.ops import cpu_jobs as jobs
from engine.ops import cpu_kernels as kernels
from engine.ops import cpu_products as products
from engine.ops import cpu_prompts as prompts
from engine.ops.team import KernelTeam, bits_of
from engine.plan import PlanItem


class PagedCpuBackend(SdpaBackend):
    name = "cpu"
    separate_tokens = True

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, team: KernelTeam):
        super().__init__(shape, kv_cache, team)
        self._kernels = team
        self._kind = kernels.kind_of(kv_cache.dtype)
        self._rows = self._ends = self._tables = torch.empty(0, dtype=torch.int64)
        fits = kv_cache.dtype is torch.bfloat16 and shape.head_dim % products.PANEL == 0
        self._by_kernel = fits and products.supported()
        self._panels = kv_cache.new_empty(0)

    def begin(self, items: Sequence[PlanItem]) -> None:
        super().begin(items)
        single = self._tokens
        width = max((-(-item.end // self._shape.page_size) for _, item in single), default=0)
        self._rows = torch.tensor([row for row, _ in single], dtype=torch.int64)
        self._ends = torch.tensor([item.end for _, item in single], dtype=torch.int64)
        tables = [item.block_ids[:width] + [0] * (width - len(item.block_ids)) for _, item in single]
        self._tables = torch.tensor(tables, dtype=torch.int64)

    def _attend_tokens(self, layer: int, q: Tensor, out: Tensor) -> None:
        if not len(self._rows):
            return
        s, cache, tables = self._shape, self._cache, self._tables
        at = (
            q.data_ptr(), q.stride(0), out.data_ptr(),
            self._rows.data_ptr(), tables.data_ptr(), tables.shape[1], self._ends.data_ptr(),
            cache.data_ptr(), layer * cache.stride(1), cache.stride(0), s.num_kv_heads, self._group,
            s.page_size, s.windows[layer], bits_of(self._scale),
        )  # fmt: skip
        self._kernels.run(jobs.ATTEND, len(self._rows), at)

    def _attend_prompt(
        self, q: Tensor, keys: Tensor, values: Tensor, begin: int, window: int, out: Tensor
    ) -> None:
        rows = q.shape[0]
        if not self._by_kernel or rows < prompts.ROWS:
            return super()._attend_prompt(q, keys, values, begin, window, out)
        s, tokens, run = self._shape, begin + rows, self._kernels.run
        numbers = 2 * s.num_kv_heads * prompts.padded(tokens) * s.head_dim
        if numbers > self._panels.numel():
            self._panels = self._cache.new_empty(numbers)
        panels, size = self._panels.data_ptr(), keys.element_size()
        strides = (keys.stride(0) * size, keys.stride(1) * size)  # values have the same
        run(jobs.PACK_HEADS, s.num_kv_heads, (keys.data_ptr(), values.data_ptr(), *strides, tokens, panels))
        at = (q.data_ptr(), q.stride(0) * size, out.data_ptr(), out.stride(0) * size, rows, begin, tokens)
        scale = bits_of(self._scale)
        run(jobs.ATTEND_PROMPT, s.num_heads, (*at, self._group, window, scale, panels))
        return None

    def _weights(self, scores: Tensor, piece: Piece) -> Tensor:
        """In place, without computing hidden keys (torch's softmax and mask take twice the time)."""
        rows = piece.rows.stop - piece.rows.start
        kernels.softmax_rows(self._kind, scores.data_ptr(), *scores.shape, rows, piece.offset, piece.window)
        return scores
