"""Matrices in FP8 or small integers, as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

FP8, BYTES, NIBBLES = "fp8", "bytes", "nibbles"
FP8_SCALED = 256.0  # scales of FP8 are stored times this, as kernels read its bits as fp16's
SPAN = (
    32  # inputs in 16 bytes of nibbles: byte i has input i in its low bits and input 16 + i in its high bits
)


@dataclass(frozen=True)
class CodedWeight:
    """A matrix as it is stored, for products whose rows are not rounded: weight[o, i] = (codes[o, i] − zeros[o, g]) ·
    scales[o, g], where input i is of group g. `codes`: uint8 [outputs, inputs], or [outputs, inputs / 2] of nibbles."""

    kind: str
    codes: Tensor
    scales: Tensor  # float32 [outputs, groups]
    zeros: Tensor | None  # uint8 [outputs, groups]; None for FP8
    group: int  # inputs of a group, a multiple of SPAN; 0: all inputs are one

    @property
    def shape(self) -> tuple[int, int]:
        outputs, stride = self.codes.shape
        return outputs, stride * (2 if self.kind == NIBBLES else 1)

    def each(self, change: Callable[[Tensor], Tensor]) -> CodedWeight:
        """Return it with `change` applied to each tensor; all of them have a row per output."""
        zeros = None if self.zeros is None else change(self.zeros)
        return CodedWeight(self.kind, change(self.codes), change(self.scales), zeros, self.group)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        """Compute the matrix in float32, by torch, and round it once to `dtype`."""
        outputs, inputs = self.shape
        if self.kind == FP8:
            numbers, scales = self.codes.view(torch.float8_e4m3fn).float(), self.scales / FP8_SCALED
        else:
            numbers, scales = self.codes.float(), self.scales
        if self.kind == NIBBLES:
            both = self.codes.view(outputs, -1, 1, SPAN // 2)
            numbers = torch.cat((both & 15, both >> 4), 2).view(outputs, inputs).float()
        group = torch.arange(inputs, device=self.codes.device) // (self.group or inputs)
        if self.zeros is not None:
            numbers -= self.zeros.float().index_select(1, group)
        return numbers.mul_(scales.index_select(1, group)).to(dtype)
