"""Products with bf16 weights by AMX, on the panels of bf16.py, compiled by numba.

A product's items are (block of rows, panel), block by block. The rows of a block are packed as registers take them,
[16 rows][32 inputs][row], and stay in the second-level cache while panels pass. Inputs are taken in slices, whose part of
a panel stays in the first-level cache while all rows of the block pass; between slices a tile's sums lie in memory.

What a tile costs beside its products is done between them: each step rounds and stores some rows of the tile before, and
prefetches the next slice and the lines that this tile is going to be stored in. One after the other they took half as
long again.

The order of a row's sums does not depend on the other rows, nor on their number: an output is begun with its bias, and
products are added input by input.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import (
    I32,
    I64,
    after,
    compiled,
    counted,
    declare,
    integers,
    keep,
    load,
    prefetch,
    store_lanes,
)
from engine.ops.cpu.codegen.tile_registers import (
    PANEL_STRIDE,
    REGISTER_ROWS,
    TILE_ROWS,
    Source,
    accumulate_tiles,
    begin_tiles,
    end_tiles,
    has_instruction,
    load_tile,
    store_tile,
    supported,
)
from engine.ops.cpu.products.bf16 import PANEL, SUMS, WEIGHTS

STEP = 32  # inputs of a step
_STEP_BYTES = STEP * PANEL * 2  # of a panel
_SLICE_STEPS = 16  # 32 KiB of a panel; first-level caches have 48 KiB
# Rows of a block. Second-level caches have 2 MiB, which two threads may share: with 1 MiB of rows and another thread
# beside it products took a tenth longer; with 0.5 MiB long rows leave too few tiles to read a panel for.
_ROWS_BYTES = 768 << 10
_SUMS_BYTES = TILE_ROWS * PANEL_STRIDE
PACKED_STEP = REGISTER_ROWS * STEP * 2


def takes(inputs: int) -> bool:
    """Whether rows of so many inputs are multiplied by AMX, however many rows."""
    return inputs % STEP == 0 and supported()


def blocks(rows: int, inputs: int) -> int:
    """Blocks of rows, each computed with all panels."""
    together = max(TILE_ROWS, _ROWS_BYTES // (inputs * 2) // TILE_ROWS * TILE_ROWS)
    return max(1, -(-rows // together))


@intrinsic
def _multiply_slice(
    typing, x, x_lower, x_stride, x_step, panel, steps, start, start_stride, start_lower, sums, ahead, lines,
    own_rows, own_out, of_rows, stored, out, out_stride, columns, per_step,
):  # fmt: skip
    """sums[TILE_ROWS, 32], fp32, of a slice, from what lies at `start` on. Each step prefetches `lines` cache lines from
    `ahead` on and `per_step` of the `own_rows` rows at `own_out`, and stores as many of the `of_rows` rows of sums at
    `stored`, of the tile before."""

    def codegen(context, builder, signature, args):
        if not has_instruction():  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        (
            x, x_lower, x_stride, x_step, panel, steps, start, start_stride, start_lower, sums, ahead, lines,
            own_rows, own_out, of_rows, stored, out, out_stride, columns, per_step,
        ) = args  # fmt: skip
        for number in range(4):
            at = after(builder, start, 64 * (number % 2))
            load_tile(builder, number, builder.add(at, start_lower) if number > 1 else at, start_stride)
        row_at, line_at = (cgutils.alloca_once_value(builder, one) for one in (ir.Constant(I64, 0), ahead))

        def within() -> None:
            line, begin = builder.load(line_at), builder.load(row_at)
            line_end = builder.add(line, builder.mul(lines, ir.Constant(I64, 64)))
            with counted(builder, ir.Constant(I64, 0), lines) as number:
                prefetch(builder, builder.add(line, builder.mul(number, ir.Constant(I64, 64))), 2)
            builder.store(line_end, line_at)
            end = builder.add(begin, per_step)
            with counted(builder, begin, least(builder, end, own_rows)) as row:
                to = builder.add(own_out, builder.mul(row, out_stride))
                prefetch(builder, to, to_write=True)
            _store(builder, begin, least(builder, end, of_rows), stored, out, out_stride, columns)
            builder.store(end, row_at)

        rows = Source(x, builder.add(x, x_lower), x_stride, x_step, passing=True)
        weights = Source(panel, after(builder, panel, 64), PANEL_STRIDE, _STEP_BYTES)
        accumulate_tiles(builder, "tdpbf16ps", rows, weights, steps, within)
        for number in range(4):
            at = REGISTER_ROWS * PANEL_STRIDE * (number // 2) + 64 * (number % 2)
            store_tile(builder, number, after(builder, sums, at), PANEL_STRIDE)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 20)), codegen


def least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _store(builder, begin, end, sums, out, out_stride, columns):
    """Round and store rows [begin, end)."""
    width = builder.trunc(columns, I32)
    rounding = declare(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", WEIGHTS, SUMS, SUMS)
    with counted(builder, begin, end) as row:
        at = after(builder, sums, builder.mul(row, ir.Constant(I64, PANEL_STRIDE)))
        low, high = (load(builder, SUMS, after(builder, at, 64 * half), 4) for half in (0, 1))
        to = builder.add(out, builder.mul(row, out_stride))
        store_lanes(builder, "v32bf16", builder.call(rounding, [high, low]), to, 2, width)


@intrinsic
def _store_sums(typing, of_rows, stored, out, out_stride, columns):
    def codegen(context, builder, signature, args):
        if has_instruction():
            _store(builder, ir.Constant(I64, 0), *args)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 5)), codegen


@njit(inline="always")
def pack_rows(x, rows, stride, to):
    """[rows, inputs] → [16 rows][32 inputs][row]. What lies behind the last row is anything."""
    for row in range(rows):
        source = integers(x + row * stride)
        within = row % REGISTER_ROWS
        target = integers(to + (row - within) * stride + within * STEP * 2)
        for step in range(stride // (STEP * 2)):
            for word in range(STEP // 4):
                target[step * (PACKED_STEP // 8) + word] = source[step * (STEP // 4) + word]


@compiled
def multiply(x, rows, inputs, panels, bias, out, outputs, blocks, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for items [first, last)."""
    if rows == 0:  # of a step without logits; registers of no rows are refused
        return
    stride, out_stride, steps = inputs * 2, outputs * 2, inputs // STEP
    tall, wide = (rows + TILE_ROWS - 1) // TILE_ROWS, (outputs + PANEL - 1) // PANEL
    slices = (steps + _SLICE_STEPS - 1) // _SLICE_STEPS
    together = (tall + blocks - 1) // blocks
    packs = rows > TILE_ROWS  # fewer are read as they lie, by registers of so many rows
    room = together * TILE_ROWS * stride if packs else 0
    buffer = np.empty((together if slices > 1 else 1) * _SUMS_BYTES + room + 64, np.uint8)
    packed = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    kept = packed + room
    x_stride, x_step = (STEP * 2, PACKED_STEP) if packs else (stride, STEP * 2)
    of_rows, stored, to, columns, packed_block = 0, kept, out, 0, -1  # of the tile before
    if packs:
        begin_tiles(REGISTER_ROWS, REGISTER_ROWS)
    else:
        begin_tiles(min(rows, REGISTER_ROWS), max(rows - REGISTER_ROWS, 1))
    for item in range(first, last):
        block, panel = item // wide, item % wide
        top, bottom = tall * block // blocks, tall * (block + 1) // blocks
        if packs and block != packed_block:
            row = top * TILE_ROWS
            pack_rows(x + row * stride, min(rows, bottom * TILE_ROWS) - row, stride, packed)
            packed_block = block
        lines = (PANEL + bottom - top - 1) // (bottom - top)
        for part in range(slices):
            low, high = steps * part // slices, steps * (part + 1) // slices
            per_step = (TILE_ROWS + high - low - 1) // (high - low)
            weights = panels + (panel * steps + low) * _STEP_BYTES
            ahead = weights + (high - low) * _STEP_BYTES
            for tile in range(top, bottom):
                row = tile * TILE_ROWS
                here = packed + (tile - top) * TILE_ROWS * stride if packs else x
                sums = kept + (tile - top if slices > 1 else 0) * _SUMS_BYTES
                start, start_stride, start_lower = bias + panel * PANEL * 4, 0, 0
                if part:
                    start, start_stride, start_lower = sums, PANEL_STRIDE, REGISTER_ROWS * PANEL_STRIDE
                own, own_rows = out + row * out_stride + panel * PANEL * 2, 0
                if part == slices - 1:
                    own_rows = min(rows - row, TILE_ROWS)
                _multiply_slice(
                    here + low * x_step, REGISTER_ROWS * stride if rows - row > REGISTER_ROWS else 0,
                    x_stride, x_step, weights, high - low, start, start_stride, start_lower, sums, ahead, lines,
                    own_rows, own, of_rows, stored, to, out_stride, columns, per_step,
                )  # fmt: skip
                ahead += lines * (high - low) * 64
                of_rows, stored, to = own_rows, sums, own
                columns = min(outputs - panel * PANEL, PANEL)
    _store_sums(of_rows, stored, to, out_stride, columns)
    end_tiles()
    keep(buffer)
