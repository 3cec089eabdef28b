"""The operations by our own kernels: a token's step through a layer is four calls, not twenty (engine/ops/cpu_kernels)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import cpu_kernels as kernels
from engine.ops.base import OpsShape
from engine.ops.team import Team


class CpuOps:
    def __init__(self, shape: OpsShape, cos: Tensor, sin: Tensor, kv_cache: Tensor, team: Team):
        self._shape = shape
        self._cos, self._sin = cos.contiguous(), sin.contiguous()
        self._cache = kv_cache
        self._team = team
        self._kind = kernels.kind_of(kv_cache.dtype)
        self._dim8 = (0,) * (shape.head_dim // 8)
        self._layer_stride, self._block_stride = kv_cache.stride(1), kv_cache.stride(0)
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        self._positions, self._slots = positions, slots

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._norm(x, 0, weight, out)
        return out

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._norm(x, delta.data_ptr(), weight, out)
        return out

    def _norm(self, x: Tensor, delta: int, weight: Tensor, out: Tensor) -> None:
        rows, width = x.shape
        kind, eps = self._kind, self._shape.norm_eps
        at, scale, to = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._team.split(
            rows, lambda first, last: kernels.add_norm(kind, at, delta, scale, to, first, last, width, eps)
        )

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        kind, at, to = self._kind, gate_up.data_ptr(), out.data_ptr()
        self._team.split(rows, lambda first, last: kernels.silu_mul(kind, at, to, first, last, width))
        return out

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        s = self._shape
        heads, kv = s.num_heads, s.num_kv_heads
        at, positions, slots = qkv.data_ptr(), self._positions.data_ptr(), self._slots.data_ptr()
        cos, sin, cache = self._cos.data_ptr(), self._sin.data_ptr(), self._cache.data_ptr()
        q_weight = 0 if q_norm is None else q_norm.data_ptr()
        k_weight = 0 if k_norm is None else k_norm.data_ptr()
        offset, page = layer * self._layer_stride, self._cache.shape[4]

        def rows(first: int, last: int) -> None:
            kernels.rotate_and_keep(
                self._kind, at, first, last, heads, kv, self._dim8, cos, sin, positions, slots,
                cache, offset, self._block_stride, page, q_weight, k_weight, s.norm_eps,
            )  # fmt: skip

        self._team.split(qkv.shape[0], rows)
        qkv = qkv.view(-1, heads + 2 * kv, s.head_dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
