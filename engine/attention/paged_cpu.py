"""Attention on the CPU: single tokens by a kernel that reads the blocks in place. Prompts in fp32, and in bf16 on CPUs
without an instruction for it, by one that does so too (engine/ops/cpu/attention/wide_prompts.py); with it by
one that needs it (prompts.py beside), and by matrix products where that kernel takes no such heads."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import kv_blocks
from engine.attention.base import AttentionShape
from engine.attention.sdpa import Piece, SdpaBackend
from engine.ops.cpu import jobs, kernels
from engine.ops.cpu.attention import prompts, wide_prompts
from engine.ops.cpu.codegen import tile_registers
from engine.ops.cpu.codegen.elements import kind_of
from engine.ops.cpu.products import bf16
from engine.ops.cpu.team import Job, KernelTeam, bits_of
from engine.step_buffers import Chunk, StepBuffers


class PagedCpuBackend(SdpaBackend):
    name = "cpu"

    def __init__(self, shape: AttentionShape, kv_cache: Tensor, team: KernelTeam):
        super().__init__(shape, kv_cache, team)
        self._kernels = team
        by_instruction = self._dtype is torch.bfloat16 and bf16.has_instruction()
        self._wide = not by_instruction
        self._softmax = kernels.softmax_rows(kind_of(self._dtype))
        self._quantized = kv_blocks.is_quantized(kv_cache)
        self._tokens = jobs.ATTEND_INT8 if self._quantized else jobs.ATTEND
        self._step: StepBuffers | None = None
        self._prompts = jobs.ATTEND_PROMPT_WIDE_INT8 if self._quantized else jobs.ATTEND_PROMPT_WIDE
        self._by_kernel = by_instruction and shape.head_dim % bf16.PANEL == 0 and not shape.cap
        self._amx = tile_registers.supported()
        self._least_rows = tile_registers.TILE_ROWS if self._amx else prompts.ROWS
        self._panels = self._flat.new_empty(0)

    def begin(self, step: StepBuffers) -> None:
        if not self._wide:
            super().begin(step)
        self._step = step

    def _chunks(self, step: StepBuffers) -> list[Chunk]:
        return step.chunks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._wide:
            return super().attend(layer, q, k, v)
        assert self._step is not None, "`begin` comes first"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._attend_tokens(layer, q, out)
        for chunk in self._step.chunks:
            self._kernels.run(*self._prompt_job(self._step, chunk, layer, q[chunk.tokens], out[chunk.tokens]))
        return out.view(q.shape[0], -1)

    def _prompt_job(self, step: StepBuffers, chunk: Chunk, layer: int, q: Tensor, out: Tensor) -> Job:
        """Attention of one item of several tokens in fp32, whose keys and values are in the cache."""
        s, cache, rows = self._shape, self._cache, q.shape[0]
        spans = wide_prompts.spans(rows * self._group, s.num_kv_heads, self._kernels.threads)
        at = (
            q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), rows, chunk.begin, step.table[chunk.row].data_ptr(),
            cache.data_ptr(), layer * cache.stride(1), cache.stride(0), s.num_kv_heads, self._group, s.page_size,
            s.windows[layer], bits_of(self._scale), bits_of(s.cap), _address(self._sinks(layer)), spans,
        )  # fmt: skip
        return self._prompts, s.num_kv_heads * spans, at

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
