"""The contract of a layer's operations: norms, rotation, writes to the KV cache, the gate."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@cache
def has_numba() -> bool:
    """Whether numba can be imported: an installed one may lack its llvmlite, or refuse the installed numpy."""
    try:
        importlib.import_module("numba")
    except Exception as error:
        log.warning("the kernels for the CPU are not available: numba can't be imported (%s)", error)
        return False
    return True


@dataclass(frozen=True)
class OpsShape:
    """Shape of the model's heads on one rank, its norms' epsilon, and what the family's layers compute."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str = "silu"  # or "gelu_tanh", "clamped_swiglu"
    table_of_layer: tuple[int, ...] = ()  # which rotary table each layer takes; empty: there is one
    swiglu_alpha: float = 0.0  # of "clamped_swiglu", as in LayerOps.gate
    swiglu_limit: float = 0.0
    dtype: torch.dtype | None = None  # of the rows; None: the cache's

    def table(self, layer: int) -> int:
        return self.table_of_layer[layer] if self.table_of_layer else 0


class LayerOps(Protocol):
    """One per rank. `begin` once a step, then the others once a layer. Tokens are rows. Weights of norms may be float32
    beside rows of another dtype."""

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        """int64 [tokens] each: a token's position in its sequence, and block · page_size + offset of its KV."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of [tokens, hidden]."""

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """x += delta, in place; returns the RMS norm of the sum."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 · inner] = [gate | up] → activation(gate) · up. "clamped_swiglu": g · sigmoid(alpha · g) · (u + 1),
        where g = min(gate, limit) and u = max(-limit, min(up, limit))."""

    def heads(
        self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[tokens, (heads + 2 · kv_heads) · dim] → q, k, v [tokens, heads, dim], normed and rotated; keys and
        values are in the cache when this returns, and k and v are what a later step will read there. May work in
        place."""
