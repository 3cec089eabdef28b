"""The operations by kernels of engine/ops/cpu_kernels: four calls for a token and layer instead of twenty."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import cpu_jobs as jobs
from engine.ops.base import OpsShape
from engine.ops.team import KernelTeam, bits_of


class CpuOps:
    def __init__(self, shape: OpsShape, cos: Tensor, sin: Tensor, kv_cache: Tensor, team: KernelTeam):
        self._shape = shape
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._cache = kv_cache
        self._team = team
        self._eps = bits_of(shape.norm_eps)
        self._layer_stride, self._block_stride = kv_cache.stride(1), kv_cache.stride(0)
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        self._positions, self._slots = positions, slots

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, 0, weight)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, delta.data_ptr(), weight)

    def _norm(self, x: Tensor, delta: int, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        at = (x.data_ptr(), delta, weight.data_ptr(), out.data_ptr(), width, self._eps)
        self._team.run(jobs.ADD_NORM, rows, at)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._team.run(jobs.GATE, rows, (gate_up.data_ptr(), out.data_ptr(), width))
        return out

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        s = self._shape
        heads, kv = s.num_heads, s.num_kv_heads
        at = (
            qkv.data_ptr(), heads, kv,
            self._cos.data_ptr(), self._sin.data_ptr(), self._positions.data_ptr(), self._slots.data_ptr(),
            self._cache.data_ptr(), layer * self._layer_stride, self._block_stride, self._cache.shape[4],
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(), self._eps,
        )  # fmt: skip
        self._team.run(jobs.HEADS, qkv.shape[0], at)
        qkv = qkv.view(-1, heads + 2 * kv, s.head_dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
