"""The operations by torch: for any device and dtype, and as reference of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine import kv_blocks
from engine.ops.base import OpsShape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class TorchOps:
    """cos and sin: float32 [positions, head_dim / 2], or one such table after the other."""

    def __init__(self, shape: OpsShape, cos: Tensor, sin: Tensor, kv_cache: Tensor):
        self._shape = shape
        self._cache = kv_cache
        self._page = kv_cache.shape[4]
        # Rotation swaps the halves by a roll; its sign is in the table.
        cos, sin = (one.view(-1, *one.shape[-2:]) for one in (cos, sin))
        dtype = shape.dtype or kv_cache.dtype
        self._cos = torch.cat((cos, cos), -1).to(kv_cache.device, dtype)
        self._sin = torch.cat((-sin, sin), -1).to(kv_cache.device, dtype)
        self._rotations = [(self._cos, self._sin)]  # of the step, by table
        self._blocks = self._offsets = torch.empty(0)

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        self._rotations = [
            (cos[positions][:, None], sin[positions][:, None])
            for cos, sin in zip(self._cos, self._sin, strict=True)
        ]
        self._blocks, self._offsets = slots // self._page, slots % self._page

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # torch's norm takes tensors of one dtype; in that of the weight, the result is rounded once
        normed = F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self._shape.norm_eps)
        return normed.to(x.dtype)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return self.norm(x.add_(delta), weight)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        s = self._shape
        if s.activation != "clamped_swiglu":
            return ACTIVATIONS[s.activation](gate).mul_(up)
        gate, up = gate.clamp(max=s.swiglu_limit), up.clamp(-s.swiglu_limit, s.swiglu_limit)
        return (gate * torch.sigmoid(gate * s.swiglu_alpha)).mul_(up.add_(1.0))

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv = self._shape.num_heads, self._shape.num_kv_heads
        qkv = qkv.view(-1, heads + 2 * kv, self._shape.head_dim)
        if q_norm is None or k_norm is None:
            rotated = self._rotate(layer, qkv[:, : heads + kv])
            q, k = rotated[:, :heads], rotated[:, heads:]
        else:
            q = self._rotate(layer, self.norm(qkv[:, :heads], q_norm))
            k = self._rotate(layer, self.norm(qkv[:, heads : heads + kv], k_norm))
        v = qkv[:, heads + kv :]
        cache = self._cache[:, layer]
        return q, self._store(cache[:, 0], k), self._store(cache[:, 1], v)

    def _store(self, cache: Tensor, rows: Tensor) -> Tensor:
        """Write keys or values; returns what a later step will read."""
        if not kv_blocks.is_quantized(cache):
            cache[self._blocks, :, self._offsets] = rows
            return rows
        quantized = kv_blocks.quantize(rows)
        for plane, own in zip(kv_blocks.split(cache), quantized, strict=True):
            plane[self._blocks, :, self._offsets] = own
        return kv_blocks.dequantize(*quantized, rows.dtype)

    def _rotate(self, layer: int, x: Tensor) -> Tensor:
        """x [tokens, heads, head_dim]."""
        cos, sin = self._rotations[self._shape.table(layer)]
        return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
