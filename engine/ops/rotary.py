"""Tables of the rotary position embedding (Su et al., RoFormer), halves form as in Llama."""

from __future__ import annotations

import torch
from torch import Tensor


def tables(inverse_frequencies: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [max_len, head_dim / 2], computed once."""
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse_frequencies)
    return angles.cos(), angles.sin()
