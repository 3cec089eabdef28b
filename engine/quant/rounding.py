"""Rounds weights to 4 bits or FP8 while they are loaded: to nearest, without calibration.

A group of inputs has a scale of its own for each output. Groups are those of the whole matrix, so all shares of it are
rounded alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.quant.expand import Parts

SMALLEST = 1e-30  # a group with a smaller scale is all zeros
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = torch.finfo(_FP8).max
_ROWS = 128  # outputs at a time, in float32


def to_int4(weight: Tensor, group: int, inside: slice, column_of: Tensor) -> Parts:
    """Weights [outputs, inputs], of which `inside` are the share's, as codes from 0 to 15 for −8 to 7 times a scale.

    The number of a group that is farthest from 0 has the code 0, and the scale the other sign: so its side of 0 has eight
    steps, and the other side seven (llama.cpp's Q4_0).
    """

    def scale(numbers: Tensor) -> Tensor:
        low, high = numbers.aminmax(dim=2)
        return torch.where(high > -low, high, low) / -8

    def codes(numbers: Tensor) -> Tensor:
        return numbers.round_().add_(8).clamp_(0, 15).to(torch.uint8)

    found = _rounded(weight, group, inside, column_of, scale, codes)
    return Parts(found.codes, found.shape, found.scales, None, column_of, torch.full_like(found.scales, 8), 4)


def to_fp8(weight: Tensor, group: int, inside: slice, column_of: Tensor) -> Parts:
    """The same as FP8 E4M3."""
    return _rounded(
        weight,
        group,
        inside,
        column_of,
        lambda numbers: torch.linalg.vector_norm(numbers, torch.inf, 2) / _FP8_LARGEST,
        lambda numbers: numbers.to(_FP8),
    )


def _rounded(
    weight: Tensor,
    group: int,
    inside: slice,
    column_of: Tensor,
    scale: Callable[[Tensor], Tensor],
    codes: Callable[[Tensor], Tensor],
) -> Parts:
    """`scale`: numbers [outputs, groups, group] → [outputs, groups]. `codes`: of numbers that are divided by it."""
    outputs, inputs = weight.shape

    def grouped(part: slice) -> Tensor:
        numbers = weight[part].float()
        return F.pad(numbers, (0, -inputs % group)).view(len(numbers), -1, group)

    rows = [slice(at, min(at + _ROWS, outputs)) for at in range(0, outputs, _ROWS)]
    scales = torch.cat([scale(grouped(part)) for part in rows])
    scales[scales.abs() < SMALLEST] = 0.0

    def some(part: slice) -> Tensor:
        own = scales[part, :, None]
        divided = grouped(part).div_(torch.where(own == 0, torch.inf, own))
        return codes(divided).flatten(1)[:, inside]

    def codes_of(part: slice) -> Tensor:
        starts = range(part.start, part.stop, _ROWS)
        return torch.cat([some(slice(at, min(at + _ROWS, part.stop))) for at in starts])

    return Parts(codes_of, (outputs, len(column_of)), scales, None, column_of)
