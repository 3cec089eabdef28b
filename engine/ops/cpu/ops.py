"""The operations by the kernels in kernels.py: four calls for a token and layer instead of twenty."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import kv_blocks
from engine.ops.base import OpsShape
from engine.ops.cpu import jobs
from engine.ops.cpu.team import Job, KernelTeam, bits_of


class CpuOps:
    """cos and sin: float32 [positions, head_dim / 2], or one such table after the other."""

    def __init__(self, shape: OpsShape, cos: Tensor, sin: Tensor, kv_cache: Tensor, team: KernelTeam):
        self._shape = shape
        self._cos, self._sin = (one.view(-1, *one.shape[-2:]).contiguous() for one in (cos, sin))
        gates = {"silu": jobs.GATE, "gelu_tanh": jobs.GATE_GELU, "clamped_swiglu": jobs.GATE_CLAMPED}
        self._gate = gates[shape.activation]
        clamped = (bits_of(shape.swiglu_alpha), bits_of(shape.swiglu_limit))
        self._gate_numbers = clamped if self._gate == jobs.GATE_CLAMPED else ()
        self._cache = kv_cache
        self._heads = jobs.HEADS_INT8 if kv_blocks.is_quantized(kv_cache) else jobs.HEADS
        self._team = team
        self._eps = bits_of(shape.norm_eps)
        self._positions = self._slots = torch.empty(0, dtype=torch.int64)

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        self._positions, self._slots = positions, slots

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, 0, weight)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, delta.data_ptr(), weight)

    def _norm(self, x: Tensor, delta: int, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._team.run(*self.norm_job(x.shape[0], x.data_ptr(), delta, weight, out.data_ptr()))
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._team.run(*self.gate_job(rows, width, gate_up.data_ptr(), out.data_ptr()))
        return out

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        s = self._shape
        at = (self._positions.data_ptr(), self._slots.data_ptr())
        self._team.run(*self.heads_job(qkv.shape[0], layer, qkv.data_ptr(), *at, q_norm, k_norm))
        heads, kv = s.num_heads, s.num_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv, s.head_dim)
        return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]

    # --- as jobs; tensors by address --------------------------------------------------------------------

    def norm_job(self, rows: int, x: int, delta: int, weight: Tensor, out: int) -> Job:
        """`delta` 0: nothing is added."""
        at = (x, delta, weight.data_ptr(), out, weight.shape[0], self._eps, _is_wide(weight))
        return jobs.ADD_NORM, rows, at

    def gate_job(self, rows: int, width: int, gate_up: int, out: int) -> Job:
        return self._gate, rows, (gate_up, out, width, *self._gate_numbers)

    def heads_job(
        self,
        rows: int,
        layer: int,
        qkv: int,
        positions: int,
        slots: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
    ) -> Job:
        s, cache, table = self._shape, self._cache, self._shape.table(layer)
        at = (
            qkv, s.num_heads, s.num_kv_heads,
            self._cos[table].data_ptr(), self._sin[table].data_ptr(), positions, slots,
            cache.data_ptr(), layer * cache.stride(1), cache.stride(0), cache.shape[4],
            0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(), self._eps,
            int(q_norm is not None and _is_wide(q_norm)),
        )  # fmt: skip
        return self._heads, rows, at


def _is_wide(weight: Tensor) -> int:
    return int(weight.dtype is torch.float32)
