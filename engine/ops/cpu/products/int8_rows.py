"""Rows of numbers to int8 codes, for the products of int8.py, compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from engine.ops.cpu.codegen.llvm import (
    F32,
    as_f32,
    as_u32,
    compiled_exactly,
    declare,
    floats,
    halves,
    octets,
    words,
)
from engine.ops.cpu.codegen.tile_registers import REGISTER_ROWS
from engine.ops.cpu.products.int8 import STEP

_SMALLEST = 1e-30  # as in engine/quant/int8.py


@intrinsic
def _fma(typing, a, b, c):
    """One rounding, whatever the compiler may contract."""

    def codegen(context, builder, signature, args):
        return builder.call(declare(builder, "llvm.fma.f32", F32, F32, F32, F32), args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _bits(address, index, kind): ...


@overload(_bits, inline="always")
def _bits_of(address, index, kind):
    """A number's bits as float32."""
    if isinstance(kind, types.Integer):
        return lambda address, index, kind: np.uint32(halves(address)[index]) << np.uint32(16)
    return lambda address, index, kind: words(address)[index]


@compiled_exactly
def quantize(kind, x, width, codes, stride, scales, largest, tiled, first, last):
    """Rows [first, last): codes = round(x · 127 / largest) + 128, scales = largest · (1 / 127).

    `largest`: the address of each row's largest absolute value, float32; 0: it is that of this row. A row with a number
    that is not finite gets a scale that is not. `tiled`: store the codes for AMX; `stride`: bytes of a row.
    """
    given, out_scales = floats(largest), floats(scales)
    for row in range(first, last):
        base = row * width
        if largest:
            top = given[row]
        else:
            most = np.uint32(0)
            for i in range(width):
                # Without the sign, bits are ordered as the values are, NaN above all.
                size = _bits(x, base + i, kind) & np.uint32(0x7FFFFFFF)
                most = size if size > most else most
            top = as_f32(most)
        inverse, scale = np.float32(127.0) / top, top * np.float32(1.0 / 127.0)
        if top < np.float32(_SMALLEST):
            inverse, scale = np.float32(0.0), np.float32(0.0)
        out_scales[row] = scale
        to, step = codes + row * stride, STEP
        if tiled:
            within = row % REGISTER_ROWS
            to, step = codes + (row - within) * stride + within * STEP, REGISTER_ROWS * STEP
        whole = width // STEP
        for part in range(whole):
            target, begin = octets(to + part * step), base + part * STEP
            for i in range(STEP):
                # 1.5 · 2²³ has steps of 1: the sum's low bits are the nearest integer, the even one of two.
                nearest = as_u32(_fma(as_f32(_bits(x, begin + i, kind)), inverse, np.float32(12582912.0)))
                target[i] = np.uint8((nearest + np.uint32(128)) & np.uint32(0xFF))
        target, begin = octets(to + whole * step), base + whole * STEP
        for i in range(width - whole * STEP):
            nearest = as_u32(_fma(as_f32(_bits(x, begin + i, kind)), inverse, np.float32(12582912.0)))
            target[i] = np.uint8((nearest + np.uint32(128)) & np.uint32(0xFF))
