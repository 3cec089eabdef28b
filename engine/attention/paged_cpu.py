"""Attention on the CPU: single tokens by a kernel that reads the blocks in place; prompts by matrix products, or in bf16
on CPUs with an instruction for it by a kernel (engine/ops/cpu_prompts), in a fraction of the time. Without the
instruction torch's products take 28 times as long in bf16 as in fp32 (measured), in which they are computed then."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import kv_blocks
from engine.attention.base import AttentionShape
from engine.attention.sdpa import Piece, SdpaBackend
from engine.ops import cpu_jobs as jobs
from engine.ops import cpu_kernels as kernels
from engine.ops import cpu_products as products
from engine.ops import cpu_prompts as prompts
from engine.ops import cpu_tiles as tiles
from engine.ops.cpu_elements import kind_of
from engine.ops.team import Job, KernelTeam, bits_of
from engine.step_buffers import Chunk, StepBuffers


class PagedCpuBackend(SdpaBackend):
    name = "cpu"

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, team: KernelTeam):
        super().__init__(shape, kv_cache, team)
        self._kernels = team
        self._in_fp32 = not products.has_instruction()
        self._softmax = kernels.softmax_rows(kind_of(torch.float32 if self._in_fp32 else self._dtype))
        self._quantized = kv_blocks.is_quantized(kv_cache)
        self._tokens = jobs.ATTEND_INT8 if self._quantized else jobs.ATTEND
        self._step: StepBuffers | None = None
        fits = self._dtype is torch.bfloat16 and shape.head_dim % products.PANEL == 0 and not shape.cap
        self._by_kernel = fits and products.has_instruction()
        self._amx = tiles.supported()
        self._least_rows = tiles.TILE_ROWS if self._amx else prompts.ROWS
        self._panels = self._flat.new_empty(0)

    def begin(self, step: StepBuffers) -> None:
        super().begin(step)
        self._step = step

    def _chunks(self, step: StepBuffers) -> list[Chunk]:
        return step.chunks

    def _attend_tokens(self, layer: int, q: Tensor, out: Tensor) -> None:
        if self._step is not None and self._step.num_singles:
            self._kernels.run(*self.tokens_job(self._step, layer, q.data_ptr(), q.stride(0), out.data_ptr()))

    def tokens_job(self, step: StepBuffers, layer: int, q: int, q_stride: int, out: int) -> Job:
        """Attention of the step's single tokens; q, whose rows are `q_stride` elements apart, and out by address."""
        s, cache, table = self._shape, self._cache, step.table
        at = (
            q, q_stride, out,
            step.singles.data_ptr(), step.cu_q.data_ptr(), step.rows.data_ptr(), step.ends.data_ptr(),
            table.data_ptr(), table.stride(0),
            cache.data_ptr(), layer * cache.stride(1), cache.stride(0), s.num_kv_heads, self._group,
            s.page_size, s.windows[layer], bits_of(self._scale), bits_of(s.cap), _address(self._sinks(layer)),
        )  # fmt: skip
        return self._tokens, step.num_singles * s.num_kv_heads, at

    def _gather(self, layer: int, blocks: Tensor, end: int) -> tuple[Tensor, Tensor]:
        if not self._quantized:
            return super()._gather(layer, blocks, end)
        s, cache = self._shape, self._cache
        both = self._flat[: 2 * s.num_kv_heads * end * s.head_dim].view(2, s.num_kv_heads, end, s.head_dim)
        of_layer = (cache.data_ptr(), layer * cache.stride(1), cache.stride(0))
        at = (*of_layer, blocks.data_ptr(), s.page_size, end, both.data_ptr())
        self._kernels.run(jobs.GATHER_INT8, 2 * s.num_kv_heads, at)
        return both[0], both[1]

    def _attend_prompt(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        begin: int,
        window: int,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        rows = q.shape[0]
        if self._in_fp32:
            keys, values = (
                one.to(torch.float32, memory_format=torch.contiguous_format) for one in (keys, values)
            )
            return super()._attend_prompt(q.float(), keys, values, begin, window, out, sinks)
        if not self._by_kernel or rows < self._least_rows:
            return super()._attend_prompt(q, keys, values, begin, window, out, sinks)
        s, tokens, run = self._shape, begin + rows, self._kernels.run
        numbers = 2 * s.num_kv_heads * prompts.padded(tokens) * s.head_dim
        if numbers > self._panels.numel():
            self._panels = self._flat.new_empty(numbers)
        panels, size = self._panels.data_ptr(), keys.element_size()
        strides = (keys.stride(0) * size, keys.stride(1) * size)  # values have the same
        run(jobs.PACK_HEADS, s.num_kv_heads, (keys.data_ptr(), values.data_ptr(), *strides, tokens, panels))
        at = (q.data_ptr(), q.stride(0) * size, out.data_ptr(), out.stride(0) * size, rows, begin, tokens)
        how = (self._group, window, bits_of(self._scale), panels, int(self._amx), _address(sinks))
        run(jobs.ATTEND_PROMPT, s.num_heads, (*at, *how))
        return None

    def _weights(self, scores: Tensor, piece: Piece, sinks: Tensor | None) -> Tensor:
        """In place, without computing hidden keys (torch's softmax and mask take twice the time)."""
        rows = piece.rows.stop - piece.rows.start
        self._softmax(scores.data_ptr(), *scores.shape, rows, piece.offset, piece.window, _address(sinks))
        return scores


def _address(sinks: Tensor | None) -> int:
    """The address of float32 sinks [heads] for the kernels; 0: the model has none."""
    return 0 if sinks is None else sinks.data_ptr()
