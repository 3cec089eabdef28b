"""Attention over a prompt in bf16. Scores and weights stay in the first two caches.

    keys ──panels of 32 tokens──►  rows × panel ─► scores, fp32 ─► softmax ─► weights, bf16
    values ─panels of 32 columns────────────────────────────────►  rows × panel ─► sums, fp32 ─► out

A tile is 12 queries (32 with AMX) of up to two heads that share a KV head. It takes the keys in blocks of 256, which lie
at multiples of 256 whatever the tile. The softmax's base is the largest score so far: where it grows, the sums of earlier
blocks are multiplied by 2^(old − new) (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
Panels that no query of the tile sees are not computed.

Sums and scores are fp32. The weights are rounded to bf16 before normalisation; the result is divided by their sum. e^x is
2^n · p(r) with a polynomial of degree 3, exact to 8e-5: a twentieth of the error of rounding to bf16 (algorithm: Cody and
Waite's reduction, as in any libm; coefficients by Remez' exchange for the relative error over |r| ≤ ½).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops.cpu_llvm import F32, I32, I64, after, compiled, declare, floats, load, spread, words
from engine.ops.cpu_products import MOST_ROWS, PANEL, SUMS, WEIGHTS, accumulate, has_instruction
from engine.ops.cpu_tiles import TILE_ROWS, begin_tiles, end_tiles, multiply_tiles, multiply_tiles_onto

ROWS = MOST_ROWS  # of a tile without AMX
BLOCK = 256  # keys: scores and weights of 12 rows are 18 KiB
HEADS = 2  # of a tile at most
_HIDDEN = np.float32(-1e30)  # finite: the difference of two infinities is no number
_LOWEST = np.float32(-1e20)  # base of a row that has seen no key: hidden ones have weight 0 beside it
_LOG2E = np.float32(1.44269504088896341)
_POWERS = (0.05517167, 0.24261112, 0.69326097, 0.99992806)
_LINE = 64


@intrinsic
def _scores(typing, q, q_stride, panel, pairs, out, out_stride):
    """out[ROWS, 32] = q · panel, fp32; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        q, q_stride, panel, pairs, out, out_stride = args
        zero = ir.Constant(SUMS, [0.0] * 16)
        for own in accumulate(builder, ROWS, q, q_stride, panel, pairs, [(zero, zero)] * ROWS):
            for half in (0, 1):
                to = builder.inttoptr(after(builder, out, 64 * half), SUMS.as_pointer())
                builder.store(own[half], to, align=4)
            out = builder.add(out, out_stride)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


@intrinsic
def _mix(typing, weights, stride, panel, pairs, sums, sums_stride):
    """sums[ROWS, 32] += weights · panel, fp32; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        weights, stride, panel, pairs, sums, sums_stride = args
        places = [sums]
        for _ in range(ROWS - 1):
            places.append(builder.add(places[-1], sums_stride))
        starts = [[load(builder, SUMS, after(builder, at, 64 * half), 4) for half in (0, 1)] for at in places]
        found = accumulate(builder, ROWS, weights, stride, panel, pairs, starts)
        for at, own in zip(places, found, strict=True):
            for half in (0, 1):
                to = builder.inttoptr(after(builder, at, 64 * half), SUMS.as_pointer())
                builder.store(own[half], to, align=4)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


def _loop(builder, count, starts, body):
    """body(index, values) → the next values, count ≥ 1 times; returns the last ones."""
    entry, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(ir.Constant(I64, 0), entry)
    values = []
    for start in starts:
        values.append(builder.phi(start.type))
        values[-1].add_incoming(start, entry)
    results = body(index, values)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, loop)
    following = builder.add(index, ir.Constant(I64, 1))
    index.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, done)
    builder.position_at_end(done)
    return results


@intrinsic
def _most(typing, scores, chunks):
    """The greatest of 32 · chunks fp32 numbers."""

    def codegen(context, builder, signature, args):
        scores, chunks = args
        largest = declare(builder, "llvm.maxnum.v16f32", SUMS, SUMS, SUMS)

        def body(index, values):
            at = builder.add(scores, builder.mul(index, ir.Constant(I64, 128)))
            return [
                builder.call(largest, [value, load(builder, SUMS, after(builder, at, 64 * half), 4)])
                for half, value in enumerate(values)
            ]

        start = ir.Constant(SUMS, [float(_HIDDEN)] * 16)
        one, two = _loop(builder, chunks, [start, start], body)
        reduce = declare(builder, "llvm.vector.reduce.fmax.v16f32", F32, SUMS)
        return builder.call(reduce, [builder.call(largest, [one, two])])

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def _powers(typing, scores, chunks, scale, top, out, sums):
    """out = 2^(scale · score − top) as bf16, for 32 · chunks fp32 scores; adds them to sums[16]."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        scores, chunks, scale, top, out, sums = args
        fma = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
        nearest = declare(builder, "llvm.rint.v16f32", SUMS, SUMS)
        scalef = declare(
            builder, "llvm.x86.avx512.mask.scalef.ps.512", SUMS, SUMS, SUMS, SUMS, ir.IntType(16), I32
        )
        factor, minus_top = spread(builder, scale), spread(builder, builder.fneg(top))
        powers = [ir.Constant(SUMS, [power] * 16) for power in _POWERS]
        everywhere, no_rounding = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)

        def body(index, values):
            at = builder.add(scores, builder.mul(index, ir.Constant(I64, 128)))
            to = builder.add(out, builder.mul(index, ir.Constant(I64, 64)))
            found = []
            for half in (0, 1):
                score = load(builder, SUMS, after(builder, at, 64 * half), 4)
                exponent = builder.call(fma, [score, factor, minus_top])
                whole = builder.call(nearest, [exponent])
                rest = builder.fsub(exponent, whole)
                power = powers[0]
                for following in powers[1:]:
                    power = builder.call(fma, [power, rest, following])
                found.append(builder.call(scalef, [power, whole, power, everywhere, no_rounding]))
            _store_rounded(builder, found, to)
            return [builder.fadd(value, power) for value, power in zip(values, found, strict=True)]

        one, two = _loop(builder, chunks, [load(builder, SUMS, sums, 4), ir.Constant(SUMS, [0.0] * 16)], body)
        builder.store(builder.fadd(one, two), builder.inttoptr(sums, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    signature = (types.int64, types.int64, types.float32, types.float32, types.int64, types.int64)
    return types.void(*signature), codegen


@intrinsic
def _divided(typing, mixed, chunks, sums, out):
    """out = mixed / the sum of sums[16], rounded to bf16, for 32 · chunks numbers."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        mixed, chunks, sums, out = args
        reduce = declare(builder, "llvm.vector.reduce.fadd.v16f32", F32, F32, SUMS)
        start = ir.Constant(F32, 0.0)
        total = builder.call(reduce, [start, load(builder, SUMS, sums, 4)], fastmath=["reassoc"])
        share = spread(builder, builder.fdiv(ir.Constant(F32, 1.0), total))

        def body(index, values):
            at = builder.add(mixed, builder.mul(index, ir.Constant(I64, 128)))
            found = [
                builder.fmul(load(builder, SUMS, after(builder, at, 64 * half), 4), share) for half in (0, 1)
            ]
            _store_rounded(builder, found, builder.add(out, builder.mul(index, ir.Constant(I64, 64))))
            return values

        _loop(builder, chunks, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _store_rounded(builder, halves, address):
    """32 fp32 numbers as bf16."""
    rounding = declare(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", WEIGHTS, SUMS, SUMS)
    rounded = builder.call(rounding, [halves[1], halves[0]])
    builder.store(rounded, builder.inttoptr(address, WEIGHTS.as_pointer()), align=2)


@intrinsic
def _keep(typing, array):
    """Keep the array's memory allocated up to here: numba frees an array after the last use of its name, and an address
    taken from it does not count."""
    return types.void(array), lambda context, builder, signature, args: context.get_dummy_value()


def padded(tokens: int) -> int:
    """`tokens` rounded up to whole panels."""
    return -(-tokens // PANEL) * PANEL


@compiled
def pack_head(keys, values, head_stride, token_stride, tokens, dim8, panels, first, last):
    """Pack the KV heads [first, last) into panels, one head after the other, keys before values. Strides in bytes. The
    last panel is padded with zeros: hidden tokens have weight 0, and 0 · 0 is 0."""
    pairs, whole = 4 * len(dim8), (tokens + PANEL - 1) // PANEL * PANEL
    for head in range(first, last):
        source = words(keys + head * head_stride)
        to = words(panels + head * whole * pairs * 8)
        step = token_stride // 4
        for token in range(whole):
            base = token // PANEL * PANEL * pairs + token % PANEL
            if token < tokens:
                for pair in range(pairs):
                    to[base + pair * PANEL] = source[token * step + pair]
            else:
                for pair in range(pairs):
                    to[base + pair * PANEL] = np.uint32(0)
        source = words(values + head * head_stride)
        to = words(panels + head * whole * pairs * 8 + whole * pairs * 4)
        for two in range(whole // 2):
            at = 2 * two * step
            for pair in range(pairs):
                even = source[at + pair] if 2 * two < tokens else np.uint32(0)
                odd = source[at + step + pair] if 2 * two + 1 < tokens else np.uint32(0)
                base = (pair // 16 * (whole // 2) + two) * PANEL + pair % 16 * 2
                to[base] = (even & np.uint32(0xFFFF)) | (odd << np.uint32(16))
                to[base + 1] = (even >> np.uint32(16)) | (odd & np.uint32(0xFFFF0000))


@njit(inline="always")
def _hide(scores, width, begin, end):
    """Keys outside [begin, end) of one row."""
    row = floats(scores)
    for i in range(min(begin, width)):
        row[i] = _HIDDEN
    for i in range(max(end, 0), width):
        row[i] = _HIDDEN


@njit(inline="always")
def _softmax(scores, width, weights, scale, top, sums, mixed, dim):
    """Weights of one row with the largest score so far as their base, which is returned."""
    chunks = width // PANEL
    new = max(top, _most(scores, chunks) * scale)
    if new > top:
        fade = np.exp2(top - new)
        old, own = floats(mixed), floats(sums)
        for i in range(dim):
            old[i] *= fade
        for i in range(16):
            own[i] *= fade
    _powers(scores, chunks, scale, new, weights, sums)
    return new


@compiled
def attend_prompt(
    q, q_stride, out, out_stride, rows, begin, tokens, dim8, group, window, scale, panels, amx, first, last
):  # fmt: skip
    """The heads [first, last): `rows` queries each, at least a tile's, the first at position `begin`, of `tokens` keys in
    `panels`; with AMX or without.

    q and out are [row, head, dim] with strides in bytes between rows.
    """
    dim = 8 * len(dim8)
    whole = (tokens + PANEL - 1) // PANEL * PANEL
    height = TILE_ROWS if amx else ROWS
    factor = np.float32(scale) * _LOG2E
    tops = np.empty(HEADS * TILE_ROWS, np.float32)
    scratch = np.empty(TILE_ROWS * (6 * BLOCK + HEADS * (6 * dim + _LINE)) + _LINE, np.uint8)
    scores = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    weights = scores + TILE_ROWS * BLOCK * 4
    mixed = weights + TILE_ROWS * BLOCK * 2
    queries = mixed + HEADS * TILE_ROWS * dim * 4
    sums = queries + HEADS * TILE_ROWS * dim * 2
    if amx:
        begin_tiles()
    head = first
    while head < last:
        together = min(HEADS, last - head, group - head % group)
        keys = panels + head // group * whole * dim * 4
        values = keys + whole * dim * 2
        for tile in range((rows + height - 1) // height):
            row = min(tile * height, rows - height)  # the last tile computes some rows again
            at = begin + row
            # Rows of q may be 4 KiB apart, which is one set of the first-level cache.
            for i in range(together * height):
                source = words(q + (row + i % height) * q_stride + (head + i // height) * dim * 2)
                to = words(queries + i * dim * 2)
                for pair in range(dim // 2):
                    to[pair] = source[pair]
                tops[i] = _LOWEST
            cleared = floats(mixed)
            for i in range(together * height * dim):
                cleared[i] = np.float32(0.0)
            cleared = floats(sums)
            for i in range(together * height * 16):
                cleared[i] = np.float32(0.0)
            low = max(0, at + 1 - window) // PANEL * PANEL if window else 0
            high = (at + height + PANEL - 1) // PANEL * PANEL
            for block in range(low // BLOCK * BLOCK, high, BLOCK):
                start, stop = max(block, low), min(block + BLOCK, high)
                width = stop - start
                cut = stop > at + 1 or (window and start < at + height - window)
                for h in range(together):
                    rows_q, rows_mixed = queries + h * height * dim * 2, mixed + h * height * dim * 4
                    for key in range(0, width, PANEL):
                        panel = keys + (start + key) * dim * 2
                        if amx:
                            multiply_tiles(rows_q, dim * 2, panel, dim // 2, scores + key * 4, BLOCK * 4)
                        else:
                            _scores(rows_q, dim * 2, panel, dim // 2, scores + key * 4, BLOCK * 4)
                    for i in range(height):
                        mine = scores + i * BLOCK * 4
                        if cut:
                            last_key = at + i + 1 - start
                            _hide(mine, width, last_key - window if window else 0, last_key)
                        tops[h * height + i] = _softmax(
                            mine, width, weights + i * BLOCK * 2, factor, tops[h * height + i],
                            sums + (h * height + i) * _LINE, rows_mixed + i * dim * 4, dim,
                        )  # fmt: skip
                    for column in range(0, dim, PANEL):
                        panel = values + (column // PANEL * whole + start) * 64
                        if amx:
                            multiply_tiles_onto(
                                weights, BLOCK * 2, panel, width // 2, rows_mixed + column * 4, dim * 4
                            )
                        else:
                            _mix(weights, BLOCK * 2, panel, width // 2, rows_mixed + column * 4, dim * 4)
            for i in range(together * height):
                to = out + (row + i % height) * out_stride + (head + i // height) * dim * 2
                _divided(mixed + i * dim * 4, dim // PANEL, sums + i * _LINE, to)
        head += together
    if amx:
        end_tiles()
    _keep(scratch)
    _keep(tops)
