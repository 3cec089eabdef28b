"""Linear layers: by torch, by oneDNN's prepacked product, by an own kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.ops.team import Job, KernelTeam

if TYPE_CHECKING:
    from engine.ops.cpu_products import Area

Linear = Callable[[Tensor], Tensor]  # y = x Wᵀ + b; x [tokens, in]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # of weight and bias

# Rows the packed layout is tuned for. Measured: one layout serves 1 to 2,048 rows equally well.
_PACK_ROWS = 16


def _can_pack() -> bool:
    """Whether torch has oneDNN's prepacked bf16 product, which is a private operation."""
    try:
        weight = torch.zeros(32, 32, dtype=torch.bfloat16)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        rows = torch.zeros(1, 32, dtype=torch.bfloat16)
        torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):
        return False
    return True


class TorchLinear:
    """bf16 on a CPU is prepacked (2× in decode); the original weight is freed."""

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


class PanelLinear:
    """bf16 on a CPU with AVX512-BF16: our own kernel (engine/ops/cpu_products), on the team's threads."""

    def __init__(self, weight: Tensor, bias: Tensor | None, team: KernelTeam, area: Area | None = None):
        from engine.ops import cpu_jobs, cpu_products

        self._run, self._code = team.run, cpu_jobs.MULTIPLY
        self.out_features, self._inputs = weight.shape
        self._panels = cpu_products.pack(weight, area)
        self._bias = torch.zeros(len(self._panels) * cpu_products.PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias
        self._at = (self._inputs, self._panels.data_ptr(), self._bias.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        out = x.new_empty(rows, self.out_features)
        self._run(*self.job(rows, x.data_ptr(), out.data_ptr()))
        return out

    def job(self, rows: int, x: int, out: int) -> Job:
        """The product as a job; tensors by address."""
        return self._code, len(self._panels), (x, rows, *self._at, out, self.out_features)
