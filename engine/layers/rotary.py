"""Rotary position embedding (Su et al., RoFormer), halves form as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """cos and signed sin of every position, computed once. `at` picks a step's rows, `__call__` turns heads."""

    def __init__(self, inverse_frequencies: Tensor, max_len: int, dtype: torch.dtype, device: torch.device):
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies)
        self._cos = torch.cat((angles.cos(), angles.cos()), -1).to(device, dtype)
        # The halves are swapped by a roll; the sign that goes with it is in the table.
        self._sin = torch.cat((-angles.sin(), angles.sin()), -1).to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, 1, head_dim] each."""
        return self._cos[positions][:, None], self._sin[positions][:, None]

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [tokens, heads, head_dim]."""
        return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
