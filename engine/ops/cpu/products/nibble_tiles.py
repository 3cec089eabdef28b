"""Products with 4-bit weights by AMX, on the panels of nibbles.py, compiled by numba.

A slice is a group of inputs, or the part of a longer one that two of fit the first-level cache when unpacked. While
the registers multiply a slice, the vector units unpack the next one into [two inputs][output][2], the lines that registers
are loaded from; and they scale and add what the registers summed before. Registers need a product's 16 cycles for no more
than one of the vector units' ports, so most of this is hidden behind products, and for a single row the registers are
hidden behind unpacking.

All numbers of rows are multiplied so, one row included: an output begins with its bias, a group's products are added input
by input by the same instruction, from 0, then scaled and added, then its offset. So the order of a row's additions
depends neither on the other rows nor on their number, nor on how a group is cut into slices: a register that is stored and
loaded again is the same.

Items are (block of rows, panel), block by block, and rows are packed, as in tiles.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import (
    F32,
    I32,
    I64,
    after,
    compiled,
    counted,
    declare,
    keep,
    load,
    prefetch,
    spread,
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
    zero_tile,
)
from engine.ops.cpu.products.bf16 import PANEL, SUMS, WEIGHTS
from engine.ops.cpu.products.nibbles import COLUMNS_BYTES, EIGHT_BYTES, EIGHT_UNPACKED, unpack_eights
from engine.ops.cpu.products.tiles import PACKED_STEP, STEP, least, pack_rows

_STEP_EIGHTS = STEP // 8
_STEP_CODES, _STEP_UNPACKED = _STEP_EIGHTS * EIGHT_BYTES, _STEP_EIGHTS * EIGHT_UNPACKED
_SLICE_STEPS = 8  # 16 KiB unpacked; the next slice lies beside it
_SUMS_BYTES = TILE_ROWS * PANEL_STRIDE
_ROWS_BYTES = 768 << 10
_BLOCK_ROWS = 128


def blocks(rows: int, inputs: int) -> int:
    """Blocks of rows, each computed with all panels."""
    together = min(_BLOCK_ROWS, _ROWS_BYTES // (inputs * 2)) // TILE_ROWS * TILE_ROWS
    return max(1, -(-rows // max(TILE_ROWS, together)))


def _multiplying(lower: bool) -> Any:
    @intrinsic
    def multiply_slice(
        typing, x, x_lower, x_stride, x_step, weights, steps, start, sums,
        codes, eight, eights, unpacked, eights_per_step, own_rows, own_out,
        of_rows, stored, scales, of_x, of_x_stride, source, source_stride, totals, out, out_stride, columns, per_step,
    ):  # fmt: skip
        """sums[TILE_ROWS, 32], fp32, of a slice, from 0 or what lies at `start` on. Each step unpacks `eights_per_step` of
        the eights [eight, eights) at `codes`, prefetches `per_step` of the `own_rows` rows at `own_out`, and settles as
        many of the `of_rows` rows of sums at `stored`, of the tile before. Without `lower`: rows 0 to 15."""

        def codegen(context, builder, signature, args):
            if not has_instruction():  # compiled on every CPU, called only with it
                return context.get_dummy_value()
            (
                x, x_lower, x_stride, x_step, weights, steps, start, sums,
                codes, eight, eights, unpacked, eights_per_step, own_rows, own_out,
                of_rows, *before, per_step,
            ) = args  # fmt: skip
            places = _places(builder, lower)
            _begin(builder, places, start)
            eight_at, row_at = (
                cgutils.alloca_once_value(builder, one) for one in (eight, ir.Constant(I64, 0))
            )

            def within() -> None:
                begin = builder.load(eight_at)
                end = least(builder, builder.add(begin, eights_per_step), eights)
                unpack_eights(builder, codes, begin, end, unpacked)
                builder.store(end, eight_at)
                begin = builder.load(row_at)
                end = builder.add(begin, per_step)
                with counted(builder, begin, least(builder, end, own_rows)) as row:
                    to = builder.add(own_out, builder.mul(row, before[-2]))
                    prefetch(builder, to, to_write=True)
                _settle_rows(builder, begin, least(builder, end, of_rows), *before)
                builder.store(end, row_at)

            rows = Source(x, builder.add(x, x_lower), x_stride, x_step, passing=True)
            panel = Source(weights, after(builder, weights, 64), PANEL_STRIDE, _STEP_UNPACKED)
            accumulate_tiles(builder, "tdpbf16ps", rows, panel, steps, within, lower=lower)
            for number, offset in places:
                store_tile(builder, number, after(builder, sums, offset), PANEL_STRIDE)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 27)), codegen

    return multiply_slice


def _places(builder, lower: bool) -> list[tuple[int, int]]:
    """The registers of sums, and where they are stored."""
    return [
        (number, REGISTER_ROWS * PANEL_STRIDE * (number // 2) + 64 * (number % 2))
        for number in range(4 if lower else 2)
    ]


def _begin(builder, places, start):
    with builder.if_else(builder.icmp_signed("==", start, ir.Constant(I64, 0))) as (fresh, going_on):
        with fresh:
            for number, _ in places:
                zero_tile(builder, number)
        with going_on:
            for number, offset in places:
                load_tile(builder, number, after(builder, start, offset), PANEL_STRIDE)


def _settle_rows(
    builder, begin, end, stored, scales, of_x, of_x_stride, source, source_stride, totals, out, out_stride, columns
):  # fmt: skip
    """Scale rows [begin, end) of a group's sums and add them to what lies at `source`: the bias or the groups before.
    `of_x`: the rows' sums of x, 0 if there are no offsets. The result goes to `totals` or, rounded, to `out` if that
    is not 0."""
    multiply_add = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
    rounding = declare(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", WEIGHTS, SUMS, SUMS)
    none, width = ir.Constant(I64, 0), builder.trunc(columns, I32)
    its_scales = [load(builder, SUMS, after(builder, scales, 64 * half), 4) for half in (0, 1)]
    with counted(builder, begin, end) as row:
        at = builder.add(stored, builder.mul(row, ir.Constant(I64, PANEL_STRIDE)))
        before = builder.add(source, builder.mul(row, source_stride))
        plain = [
            builder.call(
                multiply_add,
                [
                    load(builder, SUMS, after(builder, at, 64 * half), 4),
                    its_scales[half],
                    load(builder, SUMS, after(builder, before, 64 * half), 4),
                ],
            )
            for half in (0, 1)
        ]
        entry = builder.block
        with builder.if_then(builder.icmp_signed("!=", of_x, none)):
            its_x = builder.add(of_x, builder.mul(of_x_stride, row))
            negative = spread(builder, builder.fneg(load(builder, F32, its_x, 4)))
            less = [
                builder.call(
                    multiply_add,
                    [
                        negative,
                        load(builder, SUMS, after(builder, scales, COLUMNS_BYTES + 64 * half), 4),
                        one,
                    ],
                )
                for half, one in enumerate(plain)
            ]
            offsets = builder.block
        low, high = (
            _either(builder, (one, entry), (other, offsets)) for one, other in zip(plain, less, strict=True)
        )
        with builder.if_else(builder.icmp_signed("==", out, none)) as (going_on, done):
            with going_on:
                to = builder.add(totals, builder.mul(row, ir.Constant(I64, PANEL_STRIDE)))
                for half, value in enumerate((low, high)):
                    place = builder.inttoptr(after(builder, to, 64 * half), SUMS.as_pointer())
                    builder.store(value, place, align=4)
            with done:
                to = builder.add(out, builder.mul(row, out_stride))
                store_lanes(builder, "v32bf16", builder.call(rounding, [high, low]), to, 2, width)


def _either(builder, *ways):
    value = builder.phi(SUMS)
    for one, block in ways:
        value.add_incoming(one, block)
    return value


@intrinsic
def _settle(
    typing, of_rows, stored, scales, of_x, of_x_stride, source, source_stride, totals, out, out_stride, columns
):  # fmt: skip
    def codegen(context, builder, signature, args):
        if has_instruction():
            _settle_rows(builder, ir.Constant(I64, 0), *args)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 11)), codegen


@intrinsic
def _unpack(typing, codes, eights, to):
    def codegen(context, builder, signature, args):
        if has_instruction():
            codes, eights, to = args
            unpack_eights(builder, codes, ir.Constant(I64, 0), eights, to)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 3)), codegen


_multiply_few, _multiply_many = _multiplying(False), _multiplying(True)  # up to 16 rows, and more


@njit(inline="always")
def _group_steps(number, group, inputs):
    """The last group may have fewer."""
    return (min(inputs, (number + 1) * group) - number * group) // STEP


@njit(inline="always")
def _slice_steps(steps, part):
    """Begin and end of a part of a group of `steps`, and the number of parts, each of up to _SLICE_STEPS."""
    parts = (steps + _SLICE_STEPS - 1) // _SLICE_STEPS
    return steps * part // parts, steps * (part + 1) // parts, parts


@njit(inline="always")
def _next_slice(codes, part, number, groups, group, inputs, beside, following_panel):
    """Where the codes lie of the slice after `part` of a group, whose own begin at `codes`, and how many eights it has:
    that of the same group, of the next one behind this one's scales, or of the next panel; 0 if there is none."""
    steps = _group_steps(number, group, inputs)
    _, high, parts = _slice_steps(steps, part)
    if part + 1 < parts:
        following = _slice_steps(steps, part + 1)[1] - high
        return codes + high * _STEP_CODES, following * _STEP_EIGHTS
    at, number = codes + steps * _STEP_CODES + beside, number + 1
    if number == groups:
        at, number = following_panel, 0
    if at == 0:
        return at, 0
    return at, _slice_steps(_group_steps(number, group, inputs), 0)[1] * _STEP_EIGHTS


@compiled
def multiply(x, rows, inputs, panels, bias, out, outputs, group, sums, blocks, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for items [first, last). `group`: its inputs; `sums`: the address
    of each row's sums of x by group, float32; 0: there are no offsets."""
    if rows == 0:  # of a step without logits; registers of no rows are refused
        return
    stride, out_stride = inputs * 2, outputs * 2
    groups = (inputs + group - 1) // group
    beside = COLUMNS_BYTES * (2 if sums else 1)
    panel_size = inputs * (PANEL // 2) + groups * beside
    tall, wide = (rows + TILE_ROWS - 1) // TILE_ROWS, (outputs + PANEL - 1) // PANEL
    together = (tall + blocks - 1) // blocks
    packs, few = rows > TILE_ROWS, rows <= REGISTER_ROWS  # rows that are not packed are read as they lie
    cut = group > _SLICE_STEPS * STEP  # a tile's sums lie in memory between slices
    slice_bytes = min(group // STEP, _SLICE_STEPS) * _STEP_UNPACKED
    sums_bytes, totals_bytes = (together if cut else 1) * _SUMS_BYTES, together * _SUMS_BYTES
    packed_bytes = together * TILE_ROWS * stride if packs else 0
    buffer = np.empty(2 * slice_bytes + sums_bytes + totals_bytes + packed_bytes + 64, np.uint8)
    unpacked = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    following = unpacked + slice_bytes
    kept = following + slice_bytes
    totals = kept + sums_bytes
    packed = totals + totals_bytes
    x_stride, x_step = (STEP * 2, PACKED_STEP) if packs else (stride, STEP * 2)
    packed_block, of_rows, columns = -1, 0, 0
    stored, its_scales, of_x, source, source_stride, its_totals, to = kept, panels, 0, bias, 0, totals, 0
    begin_tiles(min(rows, REGISTER_ROWS), max(min(rows, TILE_ROWS) - REGISTER_ROWS, 1))
    if first < last:
        _unpack(
            panels + first % wide * panel_size,
            _slice_steps(_group_steps(0, group, inputs), 0)[1] * _STEP_EIGHTS,
            unpacked,
        )
    for item in range(first, last):
        block, panel = item // wide, item % wide
        top, bottom = tall * block // blocks, tall * (block + 1) // blocks
        if packs and block != packed_block:
            row = top * TILE_ROWS
            pack_rows(x + row * stride, min(rows, bottom * TILE_ROWS) - row, stride, packed)
            packed_block = block
        codes = panels + panel * panel_size
        then = panels + (item + 1) % wide * panel_size if item + 1 < last else 0
        for number in range(groups):
            steps = _group_steps(number, group, inputs)
            scales, parts = codes + steps * _STEP_CODES, _slice_steps(steps, 0)[2]
            for part in range(parts):
                low, high, _ = _slice_steps(steps, part)
                ends = part == parts - 1
                ahead, eights = _next_slice(codes, part, number, groups, group, inputs, beside, then)
                share = (eights + bottom - top - 1) // (bottom - top)  # a tile's, of the eights
                per_step = (share + high - low - 1) // (high - low)
                rows_per_step = (TILE_ROWS + high - low - 1) // (high - low)
                for tile in range(top, bottom):
                    row, at = tile * TILE_ROWS, tile - top
                    here = packed + at * TILE_ROWS * stride if packs else x
                    own, own_rows = kept + (at if cut else 0) * _SUMS_BYTES, min(rows - row, TILE_ROWS)
                    own_out = (
                        out + row * out_stride + panel * PANEL * 2 if ends and number == groups - 1 else 0
                    )
                    arguments = (
                        here + (number * (group // STEP) + low) * x_step,
                        REGISTER_ROWS * stride if own_rows > REGISTER_ROWS else 0,
                        x_stride, x_step, unpacked, high - low, own if part else 0, own,
                        ahead, min(eights, share * at), min(eights, share * (at + 1)), following, per_step,
                        own_rows if own_out else 0, own_out,
                        of_rows, stored, its_scales, of_x, groups * 4, source, source_stride, its_totals,
                        to, out_stride, columns, rows_per_step,
                    )  # fmt: skip
                    if few:
                        _multiply_few(*arguments)
                    else:
                        _multiply_many(*arguments)
                    of_rows = 0
                    if ends:
                        of_rows, stored, its_scales, to = own_rows, own, scales, own_out
                        of_x = sums + (row * groups + number) * 4 if sums else 0
                        its_totals = totals + at * _SUMS_BYTES
                        source, source_stride = its_totals, PANEL_STRIDE
                        if number == 0:
                            source, source_stride = bias + panel * COLUMNS_BYTES, 0
                        columns = min(outputs - panel * PANEL, PANEL)
                unpacked, following = following, unpacked
            codes = scales + beside
    _settle(
        of_rows, stored, its_scales, of_x, groups * 4, source, source_stride, its_totals, to, out_stride, columns
    )  # fmt: skip
    end_tiles()
    keep(buffer)
