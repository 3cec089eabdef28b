"""Products of int8 weights with int8 rows, by the CPU's instructions for them (AVX512-VNNI, AMX), compiled by numba.

A weight [outputs, inputs] is stored in panels of 32 outputs: [panel][four inputs][output][4], the layout of both
instructions; inputs are padded to 64 with weights of 0. Both multiply unsigned by signed bytes, so a row's codes are
stored with 128 added, and the sums begin with −128 times the sum of an output's weights. Sums are int32 and exact, so
both instructions, any tile and any number of ranks give equal sums. Beside the panels lies for every output: where its
sum begins, its scale, its bias.

    out = float(sum) · scale of the row · scale of the output + bias

Rows for AMX are stored as its registers take them: [16 rows][64 inputs][row][64], 1 KiB that lies together.

A product's items are (block of rows, panel), block by block: a block stays in the second-level cache while panels pass.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from cluster.process import huge_pages
from engine.ops.cpu.codegen.llvm import (
    F32,
    I32,
    I64,
    accumulate_words,
    after,
    compiled_exactly,
    counted,
    declare,
    each_count,
    keep,
    load,
    prefetch,
    spread,
    store_lanes,
)
from engine.ops.cpu.codegen.tile_registers import (
    INT8,
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
)

PANEL, STEP = 32, 64  # outputs of a panel; inputs are a multiple of STEP
MAX_ROWS = 12  # of a tile in vector registers
_ROWS_BYTES = 384 << 10  # as in bf16.py
_TILED_ROWS_BYTES = 1 << 20  # CPUs with AMX have second-level caches of 2 MiB
_SLICE_STEPS = 16  # of AMX, 64 inputs each: a panel's part of them, 32 KiB, stays in the first-level cache
_SUMS_BYTES = TILE_ROWS * PANEL * 4
_COLUMN_BYTES = 3 * PANEL * 4  # of a panel: starts, scales, biases
_I16 = ir.IntType(16)
_WORDS, _FLOATS, _HALVES = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(_I16, 32)


def supported() -> bool:
    """Whether this CPU has the vector instruction."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


def tiled(rows: int, amx: int) -> int:
    """Whether so many rows are multiplied by AMX."""
    return int(amx and rows > MAX_ROWS)


def stored_rows(rows: int) -> int:
    """Rows that their codes need memory for: AMX loads 16 together."""
    return -(-rows // REGISTER_ROWS) * REGISTER_ROWS


def blocks(rows: int, inputs: int, amx: int) -> int:
    """Blocks of rows, each computed with all panels. `inputs` are padded."""
    size = _TILED_ROWS_BYTES if tiled(rows, amx) else _ROWS_BYTES
    least = TILE_ROWS if tiled(rows, amx) else MAX_ROWS
    together = max(least, size // inputs // least * least)
    return max(1, -(-rows // together))


def padded(inputs: int) -> int:
    return -(-inputs // STEP) * STEP


def pack(codes: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 [outputs, inputs], float32 [outputs] → panels in huge pages, and what lies beside them."""
    outputs, inputs = codes.shape
    whole = F.pad(codes, (0, padded(inputs) - inputs, 0, -outputs % PANEL))
    blocks = whole.view(-1, PANEL, whole.shape[1] // 4, 4).transpose(1, 2)
    memory = huge_pages.zeroed(blocks.numel())
    panels = torch.frombuffer(memory, dtype=torch.int8).view(blocks.shape).copy_(blocks)
    columns = torch.zeros(len(panels), 3, PANEL)
    starts = whole.sum(1, dtype=torch.int32).mul_(-128)
    columns.view(torch.int32)[:, 0] = starts.view(-1, PANEL)
    columns[:, 1] = F.pad(scales, (0, -outputs % PANEL)).view(-1, PANEL)
    if bias is not None:
        columns[:, 2] = F.pad(bias.float(), (0, -outputs % PANEL)).view(-1, PANEL)
    return panels, columns


# --- the product ------------------------------------------------------------------------------------------


def _store(builder, totals, row_scale, parts, kind, to, columns):
    """Scale the 32 sums of a row, round and store those of existing columns."""
    values = []
    for total, (_, scale, bias) in zip(totals, parts, strict=True):
        value = builder.fmul(builder.fmul(builder.sitofp(total, _FLOATS), row_scale), scale)
        values.append(builder.fadd(value, bias))
    if isinstance(kind, types.Integer):
        lanes = [ir.Constant(I32, i) for i in range(PANEL)]
        both = [_rounded(builder, value) for value in values]
        whole = builder.shuffle_vector(*both, ir.Constant(ir.VectorType(I32, PANEL), lanes))
        store_lanes(builder, "v32i16", builder.trunc(whole, _HALVES), to, 2, columns)
        return
    for half, value in enumerate(values):
        store_lanes(builder, "v16f32", value, after(builder, to, 64 * half), 4, columns, 16 * half)


def _rounded(builder, value):
    """The bits of bf16, to the nearest even."""
    word = builder.bitcast(value, _WORDS)
    shift = ir.Constant(_WORDS, [16] * 16)
    odd = builder.and_(builder.lshr(word, shift), ir.Constant(_WORDS, [1] * 16))
    return builder.lshr(builder.add(builder.add(word, ir.Constant(_WORDS, [0x7FFF] * 16)), odd), shift)


def _beside(builder, beside):
    """For each half of a panel: where the sums begin, scales, biases."""
    return [
        (
            load(builder, _WORDS, after(builder, beside, 64 * half), 4),
            load(builder, _FLOATS, after(builder, beside, 128 + 64 * half), 4),
            load(builder, _FLOATS, after(builder, beside, 256 + 64 * half), 4),
        )
        for half in (0, 1)
    ]


@intrinsic
def _tile(typing, kind, rows, x, x_stride, weights, quads, beside, scales, out, out_stride, columns):
    """out[rows ≤ MAX_ROWS, columns ≤ 32] of a panel; addresses, strides in bytes. Each number of rows has code of its
    own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        if not supported():  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        _, rows, x, x_stride, weights, quads, beside, scales, out, out_stride, columns = args
        product = declare(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, _WORDS, _WORDS, _WORDS)
        width = builder.trunc(columns, I32)
        for count in each_count(builder, rows, MAX_ROWS):
            parts = _beside(builder, beside)
            starts = [[part[0] for part in parts]] * count
            sums = accumulate_words(builder, product, _WORDS, count, x, x_stride, weights, quads, starts)
            to = out
            for row, own in enumerate(sums):
                factor = spread(builder, load(builder, F32, after(builder, scales, 4 * row), 4))
                _store(builder, own, factor, parts, signature.args[0], to, width)
                to = builder.add(to, out_stride)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 10)), codegen


# --- the product by AMX -----------------------------------------------------------------------------------


@intrinsic
def _multiply_tiles(
    typing, kind, codes, lower, weights, steps, start, start_stride, start_lower, sums, ahead, lines,
    of_rows, stored, scales, beside, out, out_stride, columns, per_step,
):  # fmt: skip
    """sums[TILE_ROWS, 32], int32, of a panel, from what lies at `start` on. Each step prefetches `lines` cache lines from
    `ahead` on, and scales and stores `per_step` of the `of_rows` rows of sums at `stored`, of the tile before."""

    def codegen(context, builder, signature, args):
        if not has_instruction(INT8):  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        (
            _, codes, lower, weights, steps, start, start_stride, start_lower, sums, ahead, lines,
            of_rows, *before, per_step,
        ) = args  # fmt: skip
        for number in range(4):
            at = after(builder, start, 64 * (number % 2))
            load_tile(builder, number, builder.add(at, start_lower) if number > 1 else at, start_stride)
        row_at, line_at = (cgutils.alloca_once_value(builder, one) for one in (ir.Constant(I64, 0), ahead))

        def within() -> None:
            line, begin = builder.load(line_at), builder.load(row_at)
            with counted(builder, ir.Constant(I64, 0), lines) as number:
                address = builder.add(line, builder.mul(number, ir.Constant(I64, 64)))
                prefetch(builder, address, 2)
            builder.store(builder.add(line, builder.mul(lines, ir.Constant(I64, 64))), line_at)
            end = builder.add(begin, per_step)
            end = builder.select(builder.icmp_signed("<", end, of_rows), end, of_rows)
            _store_rows(builder, signature.args[0], begin, end, *before)
            builder.store(end, row_at)

        rows = Source(codes, builder.add(codes, lower), STEP, REGISTER_ROWS * STEP, passing=True)
        panel = Source(weights, after(builder, weights, 64), PANEL_STRIDE, STEP * PANEL)
        accumulate_tiles(builder, "tdpbusd", rows, panel, steps, within)
        for number in range(4):
            at = REGISTER_ROWS * PANEL_STRIDE * (number // 2) + 64 * (number % 2)
            store_tile(builder, number, after(builder, sums, at), PANEL_STRIDE)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 18)), codegen


@intrinsic
def _store_sums(typing, kind, of_rows, stored, scales, beside, out, out_stride, columns):
    """Scale and store the rows of sums at `stored`."""

    def codegen(context, builder, signature, args):
        if supported():
            _, of_rows, *where = args
            _store_rows(builder, signature.args[0], ir.Constant(I64, 0), of_rows, *where)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 7)), codegen


def _store_rows(builder, kind, begin, end, sums, scales, beside, out, out_stride, columns):
    parts, width = _beside(builder, beside), builder.trunc(columns, I32)
    with counted(builder, begin, end) as row:
        at = after(builder, sums, builder.mul(row, ir.Constant(I64, PANEL_STRIDE)))
        totals = [load(builder, _WORDS, after(builder, at, 64 * half), 4) for half in (0, 1)]
        scale = load(builder, F32, after(builder, scales, builder.mul(row, ir.Constant(I64, 4))), 4)
        to = after(builder, out, builder.mul(row, out_stride))
        _store(builder, totals, spread(builder, scale), parts, kind, to, width)


@njit(inline="always")
def _multiply_by_tiles(
    kind, codes, rows, inputs, panels, beside, scales, out, outputs, size, blocks, first, last
):  # fmt: skip
    tall, wide, steps = (rows + TILE_ROWS - 1) // TILE_ROWS, (outputs + PANEL - 1) // PANEL, inputs // STEP
    slices = (steps + _SLICE_STEPS - 1) // _SLICE_STEPS
    room = (tall + blocks - 1) // blocks if slices > 1 else 2
    buffer = np.empty(room * _SUMS_BYTES + 64, np.uint8)
    kept = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    stride = outputs * size
    of_rows, stored, its_scales, own, to, columns = 0, kept, scales, beside, out, 0  # of the tile before
    begin_tiles(REGISTER_ROWS, REGISTER_ROWS)
    for item in range(first, last):
        block, panel = item // wide, item % wide
        top, bottom = tall * block // blocks, tall * (block + 1) // blocks
        lines = (PANEL + bottom - top - 1) // (bottom - top)
        weights, its_beside = panels + panel * inputs * PANEL, beside + panel * _COLUMN_BYTES
        ahead = weights + inputs * PANEL
        for part in range(slices):
            low, high = steps * part // slices, steps * (part + 1) // slices
            per_step = (TILE_ROWS + high - low - 1) // (high - low)
            for tile in range(top, bottom):
                row = tile * TILE_ROWS
                sums = kept + (tile - top if slices > 1 else tile & 1) * _SUMS_BYTES
                start, start_stride, start_lower = its_beside, 0, 0
                if part:
                    start, start_stride, start_lower = sums, PANEL_STRIDE, REGISTER_ROWS * PANEL_STRIDE
                _multiply_tiles(
                    kind, codes + row * inputs + low * REGISTER_ROWS * STEP,
                    REGISTER_ROWS * inputs if rows - row > REGISTER_ROWS else 0,
                    weights + low * STEP * PANEL, high - low, start, start_stride, start_lower, sums,
                    ahead, lines, of_rows, stored, its_scales, own, to, stride, columns, per_step,
                )  # fmt: skip
                ahead += lines * (high - low) * 64
                of_rows = 0
                if part == slices - 1:
                    of_rows, stored, its_scales = min(rows - row, TILE_ROWS), sums, scales + row * 4
                    own, to = its_beside, out + row * stride + panel * PANEL * size
                    columns = min(outputs - panel * PANEL, PANEL)
    _store_sums(kind, of_rows, stored, its_scales, own, to, stride, columns)
    end_tiles()
    keep(buffer)


@compiled_exactly
def multiply(
    kind, codes, rows, inputs, panels, beside, scales, out, outputs, size, tiled, blocks, first, last
):
    """out[rows, outputs] of items [first, last). `inputs` are padded; `size` bytes of a number of `out`; `tiled`: by AMX,
    with codes in its order."""
    if tiled:
        _multiply_by_tiles(
            kind, codes, rows, inputs, panels, beside, scales, out, outputs, size, blocks, first, last
        )
        return
    wide = (outputs + PANEL - 1) // PANEL
    for item in range(first, last):
        block, panel = item // wide, item % wide
        top, bottom = rows * block // blocks, rows * (block + 1) // blocks
        weights, own = panels + panel * inputs * PANEL, beside + panel * _COLUMN_BYTES
        columns, to = min(outputs - panel * PANEL, PANEL), out + panel * PANEL * size
        tiles = (bottom - top + MAX_ROWS - 1) // MAX_ROWS
        for tile in range(tiles):
            begin = top + (bottom - top) * tile // tiles
            count = top + (bottom - top) * (tile + 1) // tiles - begin
            _tile(
                kind, count, codes + begin * inputs, inputs, weights, inputs // 4, own,
                scales + begin * 4, to + begin * outputs * size, outputs * size, columns,
            )  # fmt: skip
