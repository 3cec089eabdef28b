"""The contract of an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.step_buffers import StepBuffers


@dataclass(frozen=True)
class AttentionShape:
    """Shape of the model's attention on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    windows: tuple[int, ...]  # per layer; 0 = full attention
    scale: float | None = None  # of scores; None: 1 / √head_dim
    cap: float = 0.0  # scores become cap · tanh(score / cap); 0 = none
    # Attention sinks, float32 [layers, heads]: a logit that each softmax has beside its scores, as of a key whose value is
    # 0; None: the model has none
    sinks: Tensor | None = field(default=None, compare=False)
    dtype: torch.dtype | None = None  # of queries and results; None: the cache's

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionBackend(Protocol):
    """One per rank. `begin` once a step, then `attend` once a layer."""

    name: str
    # Whether `begin` and `attend` read nothing back to the host and use of the step's lengths only the bounds, `longest`
    # and `most_tokens`: then a step can be recorded (engine/graphs).
    capturable: bool

    def begin(self, step: StepBuffers) -> None:
        """Prepare what all layers of the step share. The buffers stay as they are until its last layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, dim]; k, v [tokens, kv_heads, dim], rotated, already in the cache, and rounded as the
        cache stores them.

        Returns [tokens, heads · dim]: each token attends to its own sequence up to itself.
        """


MakeBackend = Callable[[AttentionShape, Tensor], AttentionBackend]  # over a KV cache
