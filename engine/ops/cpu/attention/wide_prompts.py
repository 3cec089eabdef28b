"""Attention over prompts in fp32, of any head_dim: for fp32 models, and for bf16 ones on CPUs without an instruction for
bf16. Keys and values are read where they lie in the KV cache, in bf16, fp32 or int8; what is widened of them at a time is
one block of keys of one KV head, so nothing grows with the context.

    cache ─► 256 keys in panels of 16 keys ─►  6 rows × 16 keys ─► scores ─► softmax ─► weights
          └► 256 values in panels of 16 columns ───────────────────────►  6 rows × 16 columns ─► sums ─► out

An item is a KV head and up to SPAN rows: a row is a query of one of the group's heads, and those of one position follow
each other, so short prompts fill tiles too. Blocks of keys lie at multiples of 256 whatever the rows. The softmax's base
is the largest score so far, as in prompts.py. Keys that no row of a tile sees are not computed, hidden ones
have weight 0: a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from engine.ops.cpu.attention.softmax import HIDDEN, LOWEST, most_by_16
from engine.ops.cpu.codegen.elements import F, element_size, exp, load, ptr, row_elements, store
from engine.ops.cpu.codegen.llvm import (
    I32,
    I64,
    after,
    compiled,
    compiled_exactly,
    declare,
    each_count,
    floats,
    halves,
    indices,
    keep,
    reduced,
    repeated,
    row_addresses,
    spread,
)
from engine.ops.cpu.codegen.llvm import load as read
from engine.ops.cpu.products.bf16 import SUMS
from engine.ops.cpu.products.wide import MAX_ROWS, WHOLE_ROWS, accumulate

LANES = 16
BLOCK = 256  # keys: scores of a tile are 6 KiB
SPAN = 768  # rows: each block of keys is widened once for them
_LEAST_ROWS = 96  # of a part that is made for another thread: widening is a tenth of its time
_LOG2E = np.float32(1.44269504088896341)
_LN2 = np.float32(0.69314718055994531)
_LINE = 64
# 2^r for |r| ≤ ½, to 1e-7 (Remez' exchange for the relative error, softmax.py)
_POWERS = (0.00133952, 0.00967017, 0.05550327, 0.24022098, 0.69314718, 1.0)
_TO_BITS = (
    12582912.0 + 127.0
)  # 1.5 · 2²³ + the exponent's bias: a whole number added to it is in the lowest bits


def spans(rows: int, kv_heads: int, threads: int) -> int:
    """Parts of a KV head's rows, so that threads have several items each where rows are many."""
    wanted = -(-2 * threads // kv_heads) if threads > 1 else 1
    return max(-(-rows // SPAN), min(wanted, rows // _LEAST_ROWS))


def _vectors_at(builder, panels):
    """For `accumulate`: the vectors of 16 numbers at each of `panels`, which are one after the other in a panel."""

    def vectors(number):
        offset = builder.mul(number, ir.Constant(I64, 4 * LANES))
        return [read(builder, SUMS, after(builder, panel, offset), 64) for panel in panels]

    return vectors


@intrinsic
def _multiply(typing, rows, panels, x, x_stride, panel, panel_stride, inputs, out, out_stride, onto):
    """out[rows ≤ 6, 16 · panels] = x · panels, or, if `onto`, added to; fp32, addresses and strides in bytes. `panels`: 1,
    or 2 for few rows (all with AVX-512)."""

    def codegen(context, builder, signature, args):
        rows, panels, x, x_stride, panel, panel_stride, inputs, out, out_stride, onto = args
        zero = ir.Constant(SUMS, [0.0] * LANES)
        add = builder.icmp_signed("!=", onto, ir.Constant(I64, 0))
        for count in each_count(builder, rows, MAX_ROWS):
            for wide in each_count(builder, panels, 2 if count <= WHOLE_ROWS else 1):
                places = [
                    builder.inttoptr(after(builder, row, 4 * LANES * part), SUMS.as_pointer())
                    for row in row_addresses(builder, out, out_stride, count)
                    for part in range(wide)
                ]
                starts = [builder.select(add, builder.load(at, align=64), zero) for at in places]
                weights = _vectors_at(builder, row_addresses(builder, panel, panel_stride, wide))
                for at, total in zip(
                    places, accumulate(builder, count, x, x_stride, weights, inputs, starts), strict=True
                ):
                    builder.store(total, at, align=64)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 10)), codegen


@intrinsic
def _powers(typing, scores, chunks, scale, top):
    """scores = 2^(scale · score − top), for 16 · chunks numbers; returns their sum."""

    def codegen(context, builder, signature, args):
        scores, chunks, scale, top = args
        fma = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
        nearest = declare(builder, "llvm.rint.v16f32", SUMS, SUMS)
        words = ir.VectorType(I32, LANES)
        factor, minus_top = spread(builder, scale), spread(builder, builder.fneg(top))
        lowest, to_bits = (ir.Constant(SUMS, [one] * LANES) for one in (-126.0, _TO_BITS))
        mantissa = ir.Constant(words, [23] * LANES)
        first, *others = (ir.Constant(SUMS, [one] * LANES) for one in _POWERS)

        def body(index, values):
            at = builder.add(scores, builder.mul(index, ir.Constant(I64, 4 * LANES)))
            exponent = builder.call(fma, [read(builder, SUMS, at, 64), factor, minus_top])
            seen = builder.fcmp_unordered(">=", exponent, lowest)  # or NaN, which stays
            whole = builder.call(nearest, [builder.select(seen, exponent, lowest)])
            rest = builder.fsub(exponent, whole)
            power = first
            for one in others:
                power = builder.call(fma, [power, rest, one])
            bits = builder.shl(builder.bitcast(builder.fadd(whole, to_bits), words), mantissa)
            power = builder.fmul(power, builder.bitcast(bits, SUMS))
            power = builder.select(seen, power, ir.Constant(SUMS, [0.0] * LANES))
            builder.store(power, builder.inttoptr(at, SUMS.as_pointer()), align=64)
            return [builder.fadd(values[0], power)]

        lanes = repeated(builder, chunks, [ir.Constant(SUMS, [0.0] * LANES)], body)[0]
        return reduced(builder, lanes, builder.fadd)

    return types.float32(types.int64, types.int64, types.float32, types.float32), codegen


def row_scale(kind, head, offset, page, dim): ...


@overload(row_scale, inline="always")
def _row_scale_of(kind, head, offset, page, dim):
    """The scale by which the numbers of a head's token are multiplied; `head`: address of the head's plane in a block."""
    if isinstance(kind, types.Boolean):
        return lambda kind, head, offset, page, dim: load(halves(head + page * dim), offset)
    return lambda kind, head, offset, page, dim: F(1.0)


@compiled_exactly
def _widen(stored, keys, values, table, page, own, beside, low, high, dim, keys_to, values_to):
    """Keys and values of the positions [low, high), within a block of keys, to fp32 in panels. What panels have beside
    them is 0: hidden keys have weight 0, and 0 · 0 is 0. `keys`, `values`: addresses of the head's planes in block 0,
    `beside`: bytes between blocks; `own`: the first position of the block of keys."""
    blocks, k, v = indices(table), floats(keys_to), floats(values_to)
    size, columns = element_size(stored), (dim + LANES - 1) // LANES
    for at in range((low - own) // LANES * LANES, (high - own + LANES - 1) // LANES * LANES):
        token = own + at
        key_of, value_of = at // LANES * LANES * dim + at % LANES, at * LANES
        if token < low or token >= high:
            for i in range(dim):
                k[key_of + i * LANES] = F(0.0)
            for column in range(columns):
                for i in range(LANES):
                    v[column * BLOCK * LANES + value_of + i] = F(0.0)
            continue
        offset, place = token % page, np.int64(blocks[token // page]) * beside
        row = ptr(keys + place + offset * dim * size, stored)
        scale = row_scale(stored, keys + place, offset, page, dim)
        for i in range(dim):
            k[key_of + i * LANES] = load(row, i) * scale
        row = ptr(values + place + offset * dim * size, stored)
        scale = row_scale(stored, values + place, offset, page, dim)
        for column in range(columns):
            to = column * BLOCK * LANES + value_of
            width = min(LANES, dim - column * LANES)
            for i in range(width):
                v[to + i] = load(row, column * LANES + i) * scale
            for i in range(width, LANES):
                v[to + i] = F(0.0)


@compiled
def _cap_row(scores, width, factor, cap):
    """score → cap · tanh(factor · score)."""
    row = floats(scores)
    for i in range(width):
        value = row[i] * factor
        small = exp(F(-2.0) * abs(value))
        size = cap * (F(1.0) - small) / (F(1.0) + small)
        row[i] = size if value >= F(0.0) else -size


@compiled_exactly
def _attend_tile(
    queries, count, first, group, position, window, keys, values, block, low, high, dim, scale, cap, scores, mixed, bases,
    sums,
):  # fmt: skip
    """Add the keys [low, high) of a block, weighted, to `count` rows; row i is at `position` + (first + i) // group."""
    width, start = high - low, low - block
    panels, wide = width // LANES, 2 if count <= WHOLE_ROWS else 1
    columns = (dim + LANES - 1) // LANES
    for panel in range(0, panels, wide):
        _multiply(
            count, min(wide, panels - panel), queries, dim * 4, keys + (start + panel * LANES) * dim * 4,
            dim * LANES * 4, dim, scores + panel * LANES * 4, BLOCK * 4, 0,
        )  # fmt: skip
    factor = scale * _LOG2E
    base, total = floats(bases), floats(sums)
    for i in range(count):
        own = scores + i * BLOCK * 4
        if cap > F(0.0):
            _cap_row(own, width, scale / cap, cap)
            factor = _LOG2E
        row, end = floats(own), position + (first + i) // group + 1 - low
        for key in range(min(end - window, width) if window else 0):
            row[key] = HIDDEN
        for key in range(max(end, 0), width):
            row[key] = HIDDEN
        old = base[i]
        top = max(old, most_by_16(own, panels) * factor)
        if top > old:
            fade = exp((old - top) * _LN2)
            base[i] = top
            total[i] *= fade
            line = floats(mixed + i * columns * LANES * 4)
            for column in range(columns * LANES):
                line[column] *= fade
        total[i] += _powers(own, panels, factor, top)
    for column in range(0, columns, wide):
        _multiply(
            count, min(wide, columns - column), scores, BLOCK * 4, values + (column * BLOCK + start) * LANES * 4,
            BLOCK * LANES * 4, width, mixed + column * LANES * 4, columns * LANES * 4, 1,
        )  # fmt: skip


@compiled_exactly
def _begin_rows(
    kind, q, q_stride, begin, count, group, head, dim, padded, sinks, queries, mixed, bases, sums
):
    """Copy the queries of the rows [begin, begin + count) of a KV head. A sink, if it is above LOWEST, is the first
    maximum of a row, and 1 its first sum: it has a weight and no value."""
    source, logits = ptr(q, kind), floats(sinks)
    x, mix, base, total = floats(queries), floats(mixed), floats(bases), floats(sums)
    for i in range(count):
        row = begin + i
        of_head = head * group + row % group
        for column in range(dim):
            x[i * dim + column] = load(source, row // group * q_stride + of_head * dim + column)
        for column in range(padded):
            mix[i * padded + column] = F(0.0)
        sink = logits[of_head] * _LOG2E if sinks else LOWEST
        base[i], total[i] = max(sink, LOWEST), F(1.0) if sink > LOWEST else F(0.0)


@compiled_exactly
def _end_rows(kind, out, out_stride, begin, count, group, head, dim, padded, mixed, sums):
    to, mix, total = ptr(out, kind), floats(mixed), floats(sums)
    for i in range(count):
        row, share = begin + i, F(1.0) / total[i]
        at = row // group * out_stride + (head * group + row % group) * dim
        for column in range(dim):
            store(to, at + column, mix[i * padded + column] * share)


@compiled_exactly
def attend_prompt(
    kind, stored, q, q_stride, out, out_stride, rows, begin, table, cache, layer, block_stride, kv, group, page, dim8,
    window, scale, cap, sinks, spans, first, last,
):  # fmt: skip
    """The items [first, last) of kv · spans: a KV head and one of `spans` parts of its rows · group rows, SPAN at most.
    `rows` queries, the first at position `begin`, of one sequence whose blocks `table` names.

    q and out are [row, heads, dim] with strides in elements between rows; the cache's strides are those of its elements.
    `cap` > 0: scores become cap · tanh(score / cap). `sinks`: the address of the heads' attention sinks, float32 [heads];
    0: the model has none.
    """
    dim = 8 * len(dim8)
    padded = (dim + LANES - 1) // LANES * LANES
    size, plane = element_size(stored), page * row_elements(stored, dim)
    most = min(SPAN, rows * group)
    numbers = MAX_ROWS * BLOCK + BLOCK * (dim + padded) + most * (dim + padded + 2)
    scratch = np.empty(numbers * 4 + _LINE, np.uint8)
    scores = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    keys = scores + MAX_ROWS * BLOCK * 4
    values = keys + BLOCK * dim * 4
    mixed = values + BLOCK * padded * 4
    queries = mixed + most * padded * 4
    bases = queries + most * dim * 4
    sums = bases + most * 4
    for item in range(first, last):
        head, span = item // spans, item % spans
        begin_row, end_row = rows * group * span // spans, rows * group * (span + 1) // spans
        count = end_row - begin_row
        _begin_rows(
            kind, q, q_stride, begin_row, count, group, head, dim, padded, sinks, queries, mixed, bases, sums
        )
        low = max(0, begin + begin_row // group + 1 - window) if window else 0
        high = begin + (end_row - 1) // group + 1
        own = cache + (layer + head * plane) * size
        for block in range(low // BLOCK * BLOCK, high, BLOCK):
            start, stop = max(block, low), min(block + BLOCK, high)
            _widen(
                stored, own, own + kv * plane * size, table, page, block, block_stride * size, start, stop, dim,
                keys, values,
            )  # fmt: skip
            for tile in range(0, count, MAX_ROWS):
                here, row = min(MAX_ROWS, count - tile), begin_row + tile
                nearest, farthest = begin + row // group, begin + (row + here - 1) // group
                bottom = max(0, nearest + 1 - window) // LANES * LANES if window else 0
                bottom, ceiling = max(bottom, block), min(stop, farthest + 1)
                if bottom >= ceiling:
                    continue
                ceiling = (ceiling + LANES - 1) // LANES * LANES
                _attend_tile(
                    queries + tile * dim * 4, here, row, group, begin, window, keys, values, block, bottom, ceiling, dim,
                    scale, cap, scores, mixed + tile * padded * 4, bases + tile * 4, sums + tile * 4,
                )  # fmt: skip
        _end_rows(kind, out, out_stride, begin_row, count, group, head, dim, padded, mixed, sums)
    keep(scratch)
