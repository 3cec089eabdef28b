"""Products with bf16 weights on CPUs without an instruction for them: torch's take ten times as long there as in fp32.

Weights are stored as for engine/ops/cpu_products and widened to fp32 in registers: a word has two inputs of one output,
the lower of which becomes fp32 by a shift, the upper one by a mask. Rows of x are widened once, in memory. A tile has up
to 6 rows and half a panel, whose sums are 12 of AVX2's 16 registers, or up to 2 rows and a whole panel, so that memory
is read as one stream in decode. Each sum adds its inputs in their order, so a row's numbers do not depend on the rows
beside it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.ops.cpu_elements import load as element
from engine.ops.cpu_elements import ptr, store
from engine.ops.cpu_llvm import F32, I32, I64, after, compiled, declare, floats, keep, load, prefetch, spread
from engine.ops.cpu_products import PANEL, SUMS

MAX_ROWS = 6
_WHOLE_ROWS = 2  # of a tile with a whole panel, at most
# Rows that are computed together, in fp32, beside a panel in a second-level cache of 512 KiB
_ROWS_BYTES = 192 << 10
_AHEAD_BYTES = 4096  # of the stream of weights: hardware prefetchers stop at the end of a page
_PAIR_BYTES = PANEL * 4
_LINE = 64
_WORDS = ir.VectorType(I32, 16)


def _accumulate(builder, count, parts, x, x_stride, weights, pairs, starts):
    """The loop of a tile: sums of count rows and 16 outputs for each of `parts`, halves of the panel; `builder` ends after
    it. `x`: fp32, addresses and strides in bytes."""
    multiply = declare(builder, "llvm.fmuladd.v16f32", SUMS, SUMS, SUMS, SUMS)
    sources = [x]
    for _ in range(count - 1):
        sources.append(builder.add(sources[-1], x_stride))
    entry, loop, done = builder.block, builder.append_basic_block("pair"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(ir.Constant(I64, 0), entry)
    sums = [[builder.phi(SUMS) for _ in parts] for _ in range(count)]
    for own, start in zip(sums, starts, strict=True):
        for total, first in zip(own, start, strict=True):
            total.add_incoming(first, entry)
    at = builder.add(weights, builder.mul(pair, ir.Constant(I64, _PAIR_BYTES)))
    words = [load(builder, _WORDS, after(builder, at, 64 * part), 4) for part in parts]
    for part in parts:
        prefetch(builder, after(builder, at, _AHEAD_BYTES + 64 * part))
    offset = builder.mul(pair, ir.Constant(I64, 8))
    totals = [list(own) for own in sums]
    lower, upper = ir.Constant(_WORDS, [16] * 16), ir.Constant(_WORDS, [-65536] * 16)
    for odd in (0, 1):
        wide = [
            builder.bitcast(builder.and_(word, upper) if odd else builder.shl(word, lower), SUMS)
            for word in words
        ]
        for source, own in zip(sources, totals, strict=True):
            number = spread(
                builder, load(builder, F32, after(builder, after(builder, source, offset), 4 * odd), 4)
            )
            for part, half in enumerate(wide):
                own[part] = builder.call(multiply, [number, half, own[part]])
    for own, made in zip(sums, totals, strict=True):
        for total, following in zip(own, made, strict=True):
            total.add_incoming(following, loop)
    following = builder.add(pair, ir.Constant(I64, 1))
    pair.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, done)
    builder.position_at_end(done)
    return totals


@intrinsic
def _tile(typing, rows, x, x_stride, weights, pairs, bias, out):
    """out[rows ≤ MAX_ROWS, 32] = x · panel + bias in fp32; addresses, strides in bytes. Each number of rows has code of
    its own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        rows, x, x_stride, weights, pairs, bias, out = args
        done = builder.append_basic_block("tile_done")
        choice = builder.switch(rows, done)
        for count in range(1, MAX_ROWS + 1):
            form = builder.append_basic_block("tile")
            choice.add_case(ir.Constant(I64, count), form)
            builder.position_at_end(form)
            for parts in [(0, 1)] if count <= _WHOLE_ROWS else [(0,), (1,)]:
                starts = [load(builder, SUMS, after(builder, bias, 64 * part), 4) for part in parts]
                sums = _accumulate(builder, count, parts, x, x_stride, weights, pairs, [starts] * count)
                for row, own in enumerate(sums):
                    for part, total in zip(parts, own, strict=True):
                        to = after(builder, out, 4 * PANEL * row + 64 * part)
                        builder.store(total, builder.inttoptr(to, SUMS.as_pointer()), align=4)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), codegen


@compiled
def multiply(kind, x, rows, inputs, panels, bias, out, outputs, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for panels [first, last); x and out of `kind`."""
    together = max(MAX_ROWS, _ROWS_BYTES // (inputs * 4) // MAX_ROWS * MAX_ROWS)
    together = max(1, min(rows, together))
    scratch = np.empty(together * inputs * 4 + (MAX_ROWS * PANEL * 4) + _LINE, np.uint8)
    sums = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    wide = sums + MAX_ROWS * PANEL * 4
    source, to, numbers, found = ptr(x, kind), ptr(out, kind), floats(wide), floats(sums)
    for top in range(0, rows, together):
        here = min(together, rows - top)
        for i in range(here * inputs):
            numbers[i] = element(source, top * inputs + i)
        tiles = (here + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first, last):
            weights, b = panels + panel * inputs * (2 * PANEL), bias + panel * (4 * PANEL)
            columns = min(outputs - panel * PANEL, PANEL)
            for tile in range(tiles):
                begin = here * tile // tiles
                count = here * (tile + 1) // tiles - begin
                _tile(count, wide + begin * inputs * 4, inputs * 4, weights, inputs // 2, b, sums)
                for row in range(count):
                    at = (top + begin + row) * outputs + panel * PANEL
                    for column in range(columns):
                        store(to, at + column, found[row * PANEL + column])
    keep(scratch)
