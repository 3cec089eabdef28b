"""Products in fp32: with fp32 weights, and with bf16 weights on CPUs without an instruction for them, where torch's take
ten times as long as those in fp32.

Weights are stored as for bf16.py, in fp32 as [panel][input][output]. Those in bf16 are widened in
registers: a word has two inputs of one output, the lower of which becomes fp32 by a shift, the upper one by a mask. Rows
of x are widened once, in memory. A tile has up to 6 rows and half a panel, whose sums are 12 of AVX2's 16 registers, or
up to 2 rows (all 6 in AVX-512's registers) and a whole panel, so that memory is read as one stream in decode. Each sum
adds its inputs in their order, so a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.ops.cpu.codegen.elements import element_size, ptr, store
from engine.ops.cpu.codegen.elements import load as element
from engine.ops.cpu.codegen.llvm import (
    F32,
    I32,
    I64,
    after,
    compiled,
    declare,
    each_count,
    floats,
    in_rows,
    keep,
    load,
    repeated,
    row_addresses,
    spread,
    streamed,
)
from engine.ops.cpu.products.bf16 import PAIR_BYTES, PANEL, SUMS

MAX_ROWS = 6
# Of a tile with a whole panel, at most: AVX-512 has twice the registers, of twice the size.
WHOLE_ROWS = MAX_ROWS if llvmlite.binding.get_host_cpu_features().get("avx512f") else 2
# Rows that are computed together, in fp32, beside a panel in a second-level cache of 512 KiB
_ROWS_BYTES = 192 << 10
_LINE = 64
_WORDS = ir.VectorType(I32, 16)


def accumulate(builder, count, x, x_stride, weights, inputs, starts):
    """The loop of a tile with fp32 weights: sums of count rows and 16 outputs for each of `weights`, from `starts` on;
    `builder` ends after it. Addresses and strides in bytes, x in fp32. `weights` yields, at a number of the input, the
    vectors of 16 outputs."""
    multiply = declare(builder, "llvm.fmuladd.v16f32", SUMS, SUMS, SUMS, SUMS)
    sources = row_addresses(builder, x, x_stride, count)

    def add(number, sums):
        wide = weights(number)
        offset = builder.mul(number, ir.Constant(I64, 4))
        totals = []
        for source, own in zip(sources, in_rows(sums, len(wide)), strict=True):
            value = spread(builder, load(builder, F32, after(builder, source, offset), 4))
            totals += [
                builder.call(multiply, [value, part, total]) for part, total in zip(wide, own, strict=True)
            ]
        return totals

    return repeated(builder, inputs, starts, add)


def _accumulate_fp32(builder, count, parts, x, x_stride, weights, inputs, starts):
    """As _accumulate, with fp32 weights."""

    def vectors(number):
        at = builder.add(weights, builder.mul(number, ir.Constant(I64, 4 * PANEL)))
        return streamed(builder, SUMS, at, parts)

    return in_rows(accumulate(builder, count, x, x_stride, vectors, inputs, starts * count), len(parts))


def _accumulate(builder, count, parts, x, x_stride, weights, inputs, starts):
    """The loop of a tile: sums of count rows and 16 outputs for each of `parts`, halves of the panel; `builder` ends after
    it. `x`: fp32, addresses and strides in bytes."""
    pairs = builder.sdiv(inputs, ir.Constant(I64, 2))
    multiply = declare(builder, "llvm.fmuladd.v16f32", SUMS, SUMS, SUMS, SUMS)
    sources = row_addresses(builder, x, x_stride, count)
    lower, upper = ir.Constant(_WORDS, [16] * 16), ir.Constant(_WORDS, [-65536] * 16)

    def add(pair, sums):
        at = builder.add(weights, builder.mul(pair, ir.Constant(I64, PAIR_BYTES)))
        words = streamed(builder, _WORDS, at, parts)
        offset = builder.mul(pair, ir.Constant(I64, 8))
        for odd in (0, 1):
            wide = [
                builder.bitcast(builder.and_(word, upper) if odd else builder.shl(word, lower), SUMS)
                for word in words
            ]
            totals = []
            for source, own in zip(sources, in_rows(sums, len(parts)), strict=True):
                at = after(builder, after(builder, source, offset), 4 * odd)
                number = spread(builder, load(builder, F32, at, 4))
                totals += [
                    builder.call(multiply, [number, part, total])
                    for part, total in zip(wide, own, strict=True)
                ]
            sums = totals
        return sums

    return in_rows(repeated(builder, pairs, starts * count, add), len(parts))


@intrinsic
def _tile(typing, kind, rows, x, x_stride, weights, inputs, bias, out):
    """out[rows ≤ MAX_ROWS, 32] = x · panel + bias in fp32, the panel of `kind`; addresses, strides in bytes. Each number
    of rows has code of its own, whose sums are registers."""
    sums_of = _accumulate if isinstance(kind, types.Integer) else _accumulate_fp32

    def codegen(context, builder, signature, args):
        _, rows, x, x_stride, weights, inputs, bias, out = args
        for count in each_count(builder, rows, MAX_ROWS):
            for parts in [(0, 1)] if count <= WHOLE_ROWS else [(0,), (1,)]:
                starts = [load(builder, SUMS, after(builder, bias, 64 * part), 4) for part in parts]
                sums = sums_of(builder, count, parts, x, x_stride, weights, inputs, starts)
                for row, own in enumerate(sums):
                    for part, total in zip(parts, own, strict=True):
                        to = after(builder, out, 4 * PANEL * row + 64 * part)
                        builder.store(total, builder.inttoptr(to, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 7)), codegen


@compiled
def multiply(kind, x, rows, inputs, panels, bias, out, outputs, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for panels [first, last); x, W and out of `kind`."""
    together = max(MAX_ROWS, _ROWS_BYTES // (inputs * 4) // MAX_ROWS * MAX_ROWS)
    together = max(1, min(rows, together))
    scratch = np.empty(together * inputs * 4 + (MAX_ROWS * PANEL * 4) + _LINE, np.uint8)
    sums = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    wide = sums + MAX_ROWS * PANEL * 4
    panel_bytes = inputs * PANEL * element_size(kind)
    source, to, numbers, found = ptr(x, kind), ptr(out, kind), floats(wide), floats(sums)
    for top in range(0, rows, together):
        here = min(together, rows - top)
        for i in range(here * inputs):
            numbers[i] = element(source, top * inputs + i)
        tiles = (here + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first, last):
            weights, b = panels + panel * panel_bytes, bias + panel * (4 * PANEL)
            columns = min(outputs - panel * PANEL, PANEL)
            for tile in range(tiles):
                begin = here * tile // tiles
                count = here * (tile + 1) // tiles - begin
                _tile(kind, count, wide + begin * inputs * 4, inputs * 4, weights, inputs, b, sums)
                for row in range(count):
                    at = (top + begin + row) * outputs + panel * PANEL
                    for column in range(columns):
                        store(to, at + column, found[row * PANEL + column])
    keep(scratch)
