"""Products with weights in 8 or 4 bits, for CUDA. Importing it needs Triton.

int8 (W8A8): rows are rounded to int8 as on CPUs, and sums of products are integers, exact in any order. Other codes (FP8,
and integers with a scale for a group of inputs) are read as they are stored and multiplied by rows that are not rounded.

The results of int8 are scaled without fused operations, as by the kernels for CPUs (engine/ops/cpu/products/int8.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.interpreter import INTERPRETED

FP8, BYTES, NIBBLES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# 1.5 · 2²³ has steps of 1: the low bits of a number added to it are the nearest integer, the even one of two.
NEAREST, NEAREST_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)
SMALLEST = tl.constexpr(1e-30)


@triton.jit
def quantize_rows(x, largest, codes, scales, width, stride, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row of x [rows, width]: codes [rows, stride] = round(x · 127 / largest), padded with zeros;
    scales = largest · (1 / 127). `largest`: that of each row, if GIVEN; else it is that of this row. A row with a number
    that is not finite gets a scale that is not."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = x + row * width
    if GIVEN:
        top = tl.load(largest + row)
    else:
        most = tl.zeros([BLOCK], tl.int32)
        for first in range(0, width, BLOCK):
            value = tl.load(at + first + column, mask=first + column < width, other=0.0).to(tl.float32)
            # Without the sign, bits are ordered as the values are, NaN above all.
            size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            most = tl.where(size > most, size, most)
        top = tl.max(most, 0).to(tl.float32, bitcast=True)
    small = top < SMALLEST
    inverse = tl.where(small, 0.0, tl.div_rn(tl.full([], 127.0, tl.float32), tl.where(small, 1.0, top)))
    tl.store(scales + row, tl.where(small, 0.0, top * (1.0 / 127.0)))
    spread = tl.zeros([BLOCK], tl.float32)
    for first in range(0, stride, BLOCK):
        value = tl.load(at + first + column, mask=first + column < width, other=0.0).to(tl.float32)
        nearest = tl.fma(value, spread + inverse, spread + NEAREST).to(tl.int32, bitcast=True) - NEAREST_BITS
        tl.store(codes + row * stride + first + column, nearest.to(tl.int8), mask=first + column < stride)


@triton.jit
def dot4(a, b, sums):
    """sums + the products of four int8 in each int32 of a and b."""
    if INTERPRETED:
        for at in tl.static_range(4):
            sums += ((a << (24 - 8 * at)) >> 24) * ((b << (24 - 8 * at)) >> 24)
    else:
        sums = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    return sums


@triton.jit
def multiply_row_int8(
    x, x_scale, weight, scales, bias, out, outputs, stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """out [1, outputs] of one row; x [stride] and weight [outputs, stride] are int32 of four codes each. A program per
    ROWS rows of the weight, which are read once, in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = row < outputs
    at = weight + row.to(tl.int64)[:, None] * stride + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(0, stride, COLUMNS):
        inside = first + column < stride
        w = tl.load(at + first, mask=there[:, None] & inside[None, :], other=0)
        v = tl.load(x + first + column, mask=inside, other=0)
        sums = dot4(w, tl.broadcast_to(v[None, :], [ROWS, COLUMNS]), sums)
    result = tl.sum(sums, 1).to(tl.float32) * tl.load(x_scale) * tl.load(scales + row, mask=there, other=0.0)
    if BIASED:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def multiply_int8(
    x, x_scales, weight, scales, bias, out, rows, outputs, stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BIASED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """out [rows, outputs]; x [rows, stride] and weight [outputs, stride] are int8. WHOLE: INPUTS divides the stride."""
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) // tall * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    # Beyond the last row and output the last one is read again, and nothing is stored.
    at_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride + column[None, :]
    at_w = weight + tl.minimum(output, outputs - 1).to(tl.int64)[None, :] * stride + column[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.int32)
    for first in range(0, stride, INPUTS):
        if WHOLE:
            a = tl.load(at_x + first)
            b = tl.load(at_w + first)
        else:
            inside = first + column < stride
            a = tl.load(at_x + first, mask=inside[None, :], other=0)
            b = tl.load(at_w + first, mask=inside[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    there, known = row < rows, output < outputs
    of_rows = tl.load(x_scales + row, mask=there, other=0.0)
    result = sums.to(tl.float32) * of_rows[:, None] * tl.load(scales + output, mask=known, other=0.0)[None, :]
    if BIASED:
        result += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=there[:, None] & known[None, :])


@triton.jit
def numbers(codes, KIND: tl.constexpr):
    """Convert uint8 codes to float32. FP8 E4M3 gives 1/256 of its numbers, because its bits are moved to fp16's places."""
    if KIND == FP8:
        wide = codes.to(tl.int16)
        found = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        found = codes.to(tl.float32)
    return found


@triton.jit
def multiply_row_codes(
    x, codes, scales, zeros, bias, out, outputs, stride, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """out [1, outputs] = x [1, inputs] times the matrix (codes − zeros) · scales, transposed; see CodedWeight. `stride`:
    bytes of an output. A program per ROWS outputs, TILES times COLUMNS inputs at a time; COLUMNS divides GROUP. GROUP 0:
    one group of all inputs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < outputs
    # Of NIBBLES, a byte has two inputs, 16 apart.
    each: tl.constexpr = 2 if KIND == NIBBLES else 1
    width: tl.constexpr = COLUMNS // each
    tile = tl.arange(0, TILES)
    byte = tile[:, None] * width + tl.arange(0, width)[None, :]
    low = byte
    if KIND == NIBBLES:
        low = byte // 16 * 32 + byte % 16
    at = codes + row.to(tl.int64)[:, None, None] * stride + byte[None, :, :]
    of_row = row * groups
    sums = tl.zeros([ROWS, TILES, width], tl.float32)
    zero = tl.zeros([ROWS, TILES], tl.float32)
    if GROUP == 0 and KIND != FP8:
        zero += tl.load(zeros + of_row, mask=there, other=0).to(tl.float32)[:, None]
    for first in range(0, stride, TILES * width):
        inside = first + byte < stride
        w = tl.load(at + first, mask=there[:, None, None] & inside[None, :, :], other=0)
        v = tl.load(x + first * each + low, mask=inside, other=0.0).to(tl.float32)
        if GROUP > 0:
            group = (first * each + tile * COLUMNS) // GROUP
            known = there[:, None] & (group < groups)[None, :]
            of_group = of_row[:, None] + group[None, :]
            if KIND != FP8:
                zero = tl.load(zeros + of_group, mask=known, other=0).to(tl.float32)
        if KIND == NIBBLES:
            other = tl.load(x + first * each + low + 16, mask=inside, other=0.0).to(tl.float32)
            product = (numbers(w & 15, KIND) - zero[:, :, None]) * v[None, :, :]
            product += (numbers(w >> 4, KIND) - zero[:, :, None]) * other[None, :, :]
        else:
            product = (numbers(w, KIND) - zero[:, :, None]) * v[None, :, :]
        if GROUP > 0:
            product *= tl.load(scales + of_group, mask=known, other=0.0)[:, :, None]
        sums += product
    result = tl.sum(tl.sum(sums, 2), 1)
    if GROUP == 0:
        result *= tl.load(scales + of_row, mask=there, other=0.0)
    if BIASED:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def operand(x, dtype: tl.constexpr):
    kind: tl.constexpr = tl.float32 if INTERPRETED else dtype
    return x.to(kind)


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    x, codes, scales, zeros, bias, out, rows, outputs, stride, groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BIASED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As multiply_row_codes for several rows: codes are exact in the type of x, their products are added in float32, and
    scaled. INPUTS divides GROUP; WHOLE: INPUTS divides the inputs."""
    tall = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % tall * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) // tall * OUTPUTS + tl.arange(0, OUTPUTS)
    each: tl.constexpr = 2 if KIND == NIBBLES else 1
    width: tl.constexpr = INPUTS // each
    byte = tl.arange(0, width)
    low = byte
    if KIND == NIBBLES:
        low = byte // 16 * 32 + byte % 16
    # Beyond the last row and output the last one is read again, and nothing is stored.
    last = tl.minimum(output, outputs - 1)
    at_x = x + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * (stride * each) + low[None, :]
    at_w = codes + last.to(tl.int64)[None, :] * stride + byte[:, None]
    dtype: tl.constexpr = x.dtype.element_ty
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    zero = tl.zeros([OUTPUTS], tl.float32)
    if GROUP == 0 and KIND != FP8:
        zero = tl.load(zeros + last * groups).to(tl.float32)
    for first in range(0, stride, width):
        if WHOLE:
            w = tl.load(at_w + first)
            v = tl.load(at_x + first * each)
        else:
            inside = first + byte < stride
            w = tl.load(at_w + first, mask=inside[:, None], other=0)
            v = tl.load(at_x + first * each, mask=inside[None, :], other=0.0)
        of_group = last * groups
        if GROUP > 0:
            of_group += first * each // GROUP
            if KIND != FP8:
                zero = tl.load(zeros + of_group).to(tl.float32)
            product = tl.zeros([ROWS, OUTPUTS], tl.float32)
        else:
            product = sums
        if KIND == NIBBLES:
            if WHOLE:
                other = tl.load(at_x + first * each + 16)
            else:
                other = tl.load(at_x + first * each + 16, mask=inside[None, :], other=0.0)
            upper = operand(numbers(w >> 4, KIND) - zero[None, :], dtype)
            product = tl.dot(operand(other, dtype), upper, product, input_precision="ieee")
            w = w & 15
        matrix = operand(numbers(w, KIND) - zero[None, :], dtype)
        product = tl.dot(operand(v, dtype), matrix, product, input_precision="ieee")
        if GROUP > 0:
            sums += product * tl.load(scales + of_group)[None, :]
        else:
            sums = product
    if GROUP == 0:
        sums *= tl.load(scales + last * groups)[None, :]
    _store_sums(sums, bias, out, row, rows, output, outputs, BIASED)


@triton.jit
def _store_sums(sums, bias, out, row, rows, output, outputs, BIASED: tl.constexpr):
    """Add the bias to sums [ROWS, OUTPUTS] and store those of existing rows and outputs."""
    known = output < outputs
    if BIASED:
        sums += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(row < rows)[:, None] & known[None, :])


@triton.jit
def expand_codes(codes, scales, zeros, out, stride, groups, group, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """out [outputs, inputs] = (codes − zeros) · scales, in float32 and rounded once. A program per output and BLOCK
    bytes. `group`: inputs of a group."""
    row = tl.program_id(0).to(tl.int64)
    each: tl.constexpr = 2 if KIND == NIBBLES else 1
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < stride
    low = byte
    if KIND == NIBBLES:
        low = byte // 16 * 32 + byte % 16
    w = tl.load(codes + row * stride + byte, mask=inside, other=0)
    of_group = row * groups + low // group
    scale = tl.load(scales + of_group, mask=inside, other=0.0)
    zero = tl.zeros([BLOCK], tl.float32)
    if KIND != FP8:
        zero = tl.load(zeros + of_group, mask=inside, other=0).to(tl.float32)
    to = out + row * stride * each + low
    if KIND == NIBBLES:
        tl.store(to + 16, ((numbers(w >> 4, KIND) - zero) * scale).to(out.dtype.element_ty), mask=inside)
        w = w & 15
    tl.store(to, ((numbers(w, KIND) - zero) * scale).to(out.dtype.element_ty), mask=inside)
