"""Keeps a matrix as codes, for kernels that read them (engine/ops/cuda/coded_products.py; nibbles.py and nibble_tiles.py
in engine/ops/cpu/products/)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops.codes import BYTES, FP8, FP8_SCALED, NIBBLES, SPAN, CodedWeight
from engine.quant import formats
from engine.quant.expand import Parts
from engine.quant.formats import StoredFormat

_ROWS = 1024  # outputs whose codes are packed at a time
_MOST = {FP8: 448.0, BYTES: 255.0, NIBBLES: 15.0}  # the largest codes, without scales
_FLOATS = (formats.FP8, formats.FP8_BLOCKS, formats.ROUNDED_FP8)
_KEPT = (*_FLOATS, formats.PACKED, formats.AWQ, formats.GPTQ, formats.ROUNDED_INT4)
_KINDS = {0: FP8, 4: NIBBLES, 8: BYTES}


@dataclass(frozen=True)
class Kept:
    """The codes that a device's kernels read. `zero_bytes`: of a zero point that they keep, where a format is symmetric
    and where it is not."""

    kinds: frozenset[str]
    zero_bytes: tuple[int, int]


ON_CUDA, ON_CPU = Kept(frozenset((FP8, BYTES, NIBBLES)), (1, 1)), Kept(frozenset((NIBBLES,)), (0, 4))


def code_bytes(
    stored: StoredFormat | None, whole: Collection[int], shared: Collection[int], kept: Kept
) -> tuple[float, int] | None:
    """Return the bytes of a weight, its share of a group's scale included, and those of an output beside its weights; None
    if the kernels cannot read the codes of one of the matrices. `whole`, `shared`: inputs of matrices on a rank that have
    all of theirs, and a share, which must not cut a group."""
    if stored is None or stored.name not in _KEPT or stored.act_order:
        return None
    is_float = stored.name in _FLOATS
    if (FP8 if is_float else _KINDS[stored.bits]) not in kept.kinds:
        return None
    group, beside = stored.block[1], 4 if is_float else 4 + kept.zero_bytes[not stored.symmetric]
    cut = any(size % SPAN for size in whole) or any(size % (group or SPAN) for size in shared)
    if cut or group % SPAN:
        return None
    if not group:
        return stored.bits / 8, beside
    return stored.bits / 8 + beside * max(-(-size // group) / size for size in (*whole, *shared)), 0


def of_parts(parts: Parts, group: int, kinds: Collection[str]) -> CodedWeight | None:
    """`group`: inputs that share a scale; 0: all. None if the kernels can't read it: other `kinds`, groups that are no
    multiple of SPAN inputs, or begin elsewhere than at its multiples (act-order, a rank's share that cuts one), weights
    that are not finite, and MXFP4."""
    outputs, inputs = parts.shape
    kind = _KINDS[parts.bits]
    if inputs % SPAN or kind not in kinds:
        return None
    size = group if group and parts.scales.shape[1] > 1 else 0
    if size and (size % SPAN or not _is_regular(parts.column_of, size)):
        return None
    scales = parts.scales.float()
    if not bool((scales.abs() * _MOST[kind] < torch.finfo(torch.bfloat16).max).all()):
        return None
    codes = torch.empty(outputs, inputs // 2 if kind == NIBBLES else inputs, dtype=torch.uint8)
    for begin in range(0, outputs, _ROWS):
        part = slice(begin, min(begin + _ROWS, outputs))
        found = parts.codes(part)
        if kind == FP8:
            if found.dtype is not torch.float8_e4m3fn:  # MXFP4
                return None
            found = found.contiguous().view(torch.uint8)
            if bool((found & 0x7F == 0x7F).any()):  # NaN
                return None
        codes[part] = _paired(found) if kind == NIBBLES else found
    if parts.row_of is not None:
        scales = scales[parts.row_of]
    if kind == FP8:
        return CodedWeight(kind, codes, (scales * FP8_SCALED).contiguous(), None, size)
    assert parts.zeros is not None, "integers have them"
    return CodedWeight(kind, codes, scales.contiguous(), parts.zeros.to(torch.uint8).contiguous(), size)


def _is_regular(column_of: Tensor | None, group: int) -> bool:
    return column_of is not None and torch.equal(column_of, torch.arange(len(column_of)) // group)


def _paired(codes: Tensor) -> Tensor:
    low, high = codes.reshape(len(codes), -1, 2, SPAN // 2).unbind(2)
    return (low | high << 4).flatten(1)
