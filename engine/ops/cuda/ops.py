"""The operations by kernels for CUDA, one launch each. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from engine.ops.base import OpsShape
from engine.ops.cuda import kernels

GATE_BLOCK = 1024
HEADS_TOGETHER = 8  # of one token, by one program
# Of multiply_row: the fastest of twelve choices for 1B and 8B shapes on an H100
ROW_SIZES = {"ROWS": 2, "COLUMNS": 1024, "num_warps": 4}
# How all kernels are compiled, those of attention as well. Named, because the default differs between versions of Triton.
OPTIONS = {"enable_fp_fusion": True}


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def norm_sizes(width: int) -> dict[str, int]:
    block = int(triton.next_power_of_2(width))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, inputs] times weight [outputs, inputs] transposed, plus bias [outputs] → [1, outputs]. These products are
    most of a decode step of one sequence, and read weights faster here than in cuBLAS (docs/results.md)."""
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs)
    kernels.multiply_row[(triton.cdiv(outputs, ROW_SIZES["ROWS"]),)](
        x, weight, x if bias is None else bias, out, outputs, inputs, BIASED=bias is not None, **ROW_SIZES, **OPTIONS,
    )  # fmt: skip
    return out


def gate_kind(shape: OpsShape) -> dict[str, Any]:
    """The constants that gate_rows is compiled with."""
    clamped = shape.activation == "clamped_swiglu"
    return {
        "GELU": shape.activation == "gelu_tanh",
        "ALPHA": shape.swiglu_alpha if clamped else 1.0,
        "LIMIT": shape.swiglu_limit if clamped else 0.0,
    }


class TritonOps:
    def __init__(self, shape: OpsShape, cos: Tensor, sin: Tensor, kv_cache: Tensor):
        self._shape = shape
        self._cache = kv_cache
        dtype = shape.dtype or kv_cache.dtype
        self._cos, self._sin = (
            one.view(-1, *one.shape[-2:]).to(kv_cache.device, dtype).contiguous() for one in (cos, sin)
        )
        self._positions = self._slots = torch.empty(0)

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        self._positions, self._slots = positions, slots

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, None, weight)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return self._norm(x, delta, weight)

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        kernels.norm_rows[(rows,)](
            x, x if delta is None else delta, weight, out, width, self._shape.norm_eps,
            ADDS=delta is not None, **norm_sizes(width), **OPTIONS,
        )  # fmt: skip
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        grid = (rows, triton.cdiv(inner, GATE_BLOCK))
        kernels.gate_rows[grid](
            gate_up, out, inner, BLOCK=GATE_BLOCK, num_warps=4, **gate_kind(self._shape), **OPTIONS
        )
        return out

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        s, cache = self._shape, self._cache
        heads, kv = s.num_heads, s.num_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv, s.head_dim)
        norms = q_norm is not None and k_norm is not None
        cos, sin = self._cos[s.table(layer)], self._sin[s.table(layer)]
        grid = (qkv.shape[0], triton.cdiv(heads + 2 * kv, HEADS_TOGETHER))
        kernels.rotate_heads[grid](
            qkv, cache[:, layer, 0], cos, sin, q_norm if norms else cos,
            k_norm if norms else cos, self._positions, self._slots, s.norm_eps, cache.stride(0), cache.stride(2),
            HEADS=heads, KV_HEADS=kv, DIM=s.head_dim, HALF_WIDTH=triton.next_power_of_2(s.head_dim // 2),
            PAGE=cache.shape[4], ROW=cache.shape[5], NORMS=norms, TOGETHER=HEADS_TOGETHER, num_warps=2, **OPTIONS,
        )  # fmt: skip
        return qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
