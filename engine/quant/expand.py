"""Expands stored codes and scales to weights in the dtype that the engine computes with.

All functions are pure. A share of a matrix is expanded as the whole would be: `row_of` and `column_of` say which scale
each of its outputs and inputs has, wherever a rank's share begins.

Codes are unpacked a few outputs at a time, so that the memory beside the result and what is stored does not grow with the
outputs. Packing a matrix for the kernels, or joining it with others, takes as much as its
result again, quantised or not; so the rule for memory (engine/kv_cache.py) has no term for expanding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Codes = Callable[[slice], Tensor]  # outputs → their codes [outputs, inputs]

_ROWS = 128  # outputs that are expanded at a time, in float32
# AutoAWQ packs eight outputs per word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on: the place of each.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
# FP4 (E2M1), doubled so that all are integers (Open Compute Project, Microscaling Formats 1.0, 5.3.3).
_FP4_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
# E8M0: 2 to the power of e − 127, here halved; 255 is not a number.
_E8M0_HALVED = torch.tensor([*(2.0 ** (e - 128) for e in range(255)), float("nan")])


@dataclass(frozen=True)
class Parts:
    """A share of a matrix as it is stored: the arguments of `expand`."""

    codes: Codes
    shape: tuple[int, int]
    scales: Tensor
    row_of: Tensor | None = None
    column_of: Tensor | None = None
    zeros: Tensor | None = None
    bits: int = 0  # of the codes, which are unsigned integers; 0: they are numbers

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Raises NotFiniteError."""
        return expand(self.codes, self.shape, self.scales, dtype, self.row_of, self.column_of, self.zeros)


class NotFiniteError(ValueError):
    """A stored scale or code is infinite, NaN or too large."""


def expand(
    codes: Codes,
    shape: tuple[int, int],
    scales: Tensor,
    dtype: torch.dtype,
    row_of: Tensor | None = None,
    column_of: Tensor | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """(codes − zeros) · scales, in float32 and rounded once.

    shape: [outputs, inputs]; scales and zeros [rows, columns], of which output o and input i have
    [row_of[o], column_of[i]]. None: output o has row o; the only column. Raises NotFiniteError.
    """
    out = torch.empty(shape, dtype=dtype)
    scales = scales.float()
    for at in range(0, len(out), _ROWS):
        part = slice(at, min(at + _ROWS, len(out)))
        rows = part if row_of is None else row_of[part]
        numbers = codes(part).float()
        if zeros is not None:
            numbers -= _columns(zeros[rows].float(), column_of)
        out[part] = numbers.mul_(_columns(scales[rows], column_of))
        # A sum is quicker than a check of each element, but may overflow.
        if not out[part].sum(dtype=torch.float32).isfinite() and not out[part].isfinite().all():
            raise NotFiniteError(f"its codes and scales give weights that are not finite in {dtype}")
    return out


def _columns(values: Tensor, column_of: Tensor | None) -> Tensor:
    return values if column_of is None else values.index_select(1, column_of)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Words [rows, n], filled from the lowest bits on → uint8 [rows, n · bits of a word / bits]; 4 or 8 bits."""
    # A copy, because a view of bytes needs a last stride of 1, and `contiguous` does not ensure that for a single word.
    found = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 4:
        found = torch.stack((found & 15, found >> 4), dim=-1).flatten(-2)
    return found


def unpack_awq(words: Tensor) -> Tensor:
    """int32 [rows, n] → uint8 [rows, 8 n], in AutoAWQ's order."""
    return unpack(words, 4).view(len(words), -1, 8)[:, :, _AWQ_PLACES].flatten(1)


def gptq_zeros(words: Tensor, bits: int, offset: int) -> Tensor:
    """int32 [groups, n] → uint8 [groups, outputs]. GPTQ's first format stores zero points minus `offset`, which was
    subtracted from whole words: so it is added to whole words."""
    if offset:
        ones = sum(offset << at for at in range(0, 32, bits))
        words = words + torch.tensor(ones, dtype=torch.int32)
    return unpack(words, bits)


def mxfp4(blocks: Tensor, scales: Tensor, inside: slice, column_of: Tensor) -> Parts:
    """The inputs `inside` of blocks uint8 [outputs, inputs / 2], the even input in the low four bits; scales uint8
    [outputs, groups of 32]."""

    def codes(part: slice) -> Tensor:
        return _FP4_DOUBLED[unpack(blocks[part], 4).int()][:, inside]

    shape = (len(blocks), len(column_of))
    return Parts(codes, shape, _E8M0_HALVED[scales.int()], column_of=column_of)
