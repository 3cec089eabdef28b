"""Products with fp32 weights that stay as they are, [outputs, inputs]: those of an output head that is the table of the
embedding too, which is a large part of a small model and is not stored twice.

A tile is 1 row and 4 outputs, or up to 3 rows and 2 outputs: each pair has 16 sums, of every 16th input, that are added in
one order whatever the tile. So a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import (
    F32,
    I64,
    STREAM_AHEAD_BYTES,
    after,
    compiled_exactly,
    declare,
    each_count,
    floats,
    in_rows,
    keep,
    load,
    prefetch,
    reduced,
    repeated,
    row_addresses,
)
from engine.ops.cpu.products.bf16 import SUMS

LANES = 16  # by which the number of inputs is divisible
ITEM = 32  # outputs of one item of a job
_ROWS, _OUTPUTS, _OUTPUTS_OF_ONE = 3, 2, 4  # of a tile; of one with a single row


def takes(inputs: int) -> bool:
    return inputs % LANES == 0


def _dots(builder, rows, outputs, x, weights, stride, inputs, found):
    """found[row, 4] = x[rows] · weights[outputs] for numbers of both that are known now; rows of both are `stride` bytes
    apart."""
    multiply = declare(builder, "llvm.fmuladd.v16f32", SUMS, SUMS, SUMS, SUMS)
    of_rows = row_addresses(builder, x, stride, rows)
    of_outputs = row_addresses(builder, weights, stride, outputs)

    def add(chunk, sums):
        offset = builder.mul(chunk, ir.Constant(I64, 4 * LANES))
        wide = [load(builder, SUMS, after(builder, at, offset), 4) for at in of_outputs]
        for at in of_outputs:
            prefetch(builder, after(builder, after(builder, at, offset), STREAM_AHEAD_BYTES))
        totals = []
        for at, own in zip(of_rows, in_rows(sums, outputs), strict=True):
            value = load(builder, SUMS, after(builder, at, offset), 4)
            totals += [
                builder.call(multiply, [value, one, total]) for one, total in zip(wide, own, strict=True)
            ]
        return totals

    chunks = builder.sdiv(inputs, ir.Constant(I64, LANES))
    zeros = [ir.Constant(SUMS, [0.0] * LANES)] * (rows * outputs)
    for row, own in enumerate(in_rows(repeated(builder, chunks, zeros, add), outputs)):
        for column, lanes in enumerate(own):
            to = after(builder, found, 4 * (_OUTPUTS_OF_ONE * row + column))
            builder.store(
                reduced(builder, lanes, builder.fadd), builder.inttoptr(to, F32.as_pointer()), align=4
            )


@intrinsic
def _tile(typing, rows, outputs, x, weights, inputs, found):
    """found[rows, 4] = x · weightsᵀ in fp32; addresses. Each size has code of its own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        rows, outputs, x, weights, inputs, found = args
        stride = builder.mul(inputs, ir.Constant(I64, 4))
        for count in each_count(builder, rows, _ROWS):
            for wide in each_count(builder, outputs, _OUTPUTS_OF_ONE if count == 1 else _OUTPUTS):
                _dots(builder, count, wide, x, weights, stride, inputs, found)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


@compiled_exactly
def multiply(x, rows, inputs, weights, bias, out, outputs, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias in fp32, for the outputs of items [first, last). `bias`: that of
    all items' outputs."""
    scratch = np.empty(_ROWS * _OUTPUTS_OF_ONE, np.float32)
    found, to, added = np.int64(scratch.ctypes.data), floats(out), floats(bias)
    for item in range(first, last):
        end = min(outputs, (item + 1) * ITEM)
        for row in range(0, rows, _ROWS):
            count = min(_ROWS, rows - row)
            step = _OUTPUTS_OF_ONE if count == 1 else _OUTPUTS
            for output in range(item * ITEM, end, step):
                columns = min(step, end - output)
                _tile(count, columns, x + row * inputs * 4, weights + output * inputs * 4, inputs, found)
                for i in range(count):
                    for column in range(columns):
                        value = scratch[i * _OUTPUTS_OF_ONE + column]
                        to[(row + i) * outputs + output + column] = value + added[output + column]
    keep(scratch)
