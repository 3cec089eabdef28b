"""Attention over a prompt in bf16, by the instruction of engine/ops/cpu_products. Scores and weights stay in the cache.

    keys ──panels of 32 tokens──►  12 rows × panel ─► scores, fp32 ─► softmax ─► weights, bf16
    values ─panels of 32 columns─────────────────────────────────────────────►  12 rows × panel ─► out

A tile is 12 queries of one head; it computes the scores of the panels that its last query may see, so half of the square
is left out. Sums and scores are fp32. The weights are rounded to bf16 before normalisation; the result is divided by
their sum. e^x is 2^n · p(r) with a polynomial of degree 4, exact to 4e-5: a tenth of the error of rounding to bf16
(algorithm: Cody and Waite's reduction, as in any libm).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops.cpu_llvm import F32, I32, I64, after, compiled, declare, floats, load, spread, words
from engine.ops.cpu_products import MOST_ROWS, PANEL, ROUNDED, SUMS, accumulate, has_instruction

ROWS = MOST_ROWS  # of a tile; shorter prompts are computed by sdpa.py
_HIDDEN = np.float32(-1e30)  # finite: the difference of two infinities is no number
_LOG2E = np.float32(1.44269504088896341)
_POWERS = (0.00961813, 0.05550411, 0.24022651, 0.69314718, 1.0)  # Taylor's, of 2^r: |r| ≤ ½


@intrinsic
def _scores(typing, q, q_stride, panel, pairs, out, out_stride):
    """out[ROWS, 32] = q · panel, fp32; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        q, q_stride, panel, pairs, out, out_stride = args
        zero = ir.Constant(SUMS, [0.0] * 16)
        for own in accumulate(builder, ROWS, q, q_stride, panel, pairs, [zero, zero]):
            for half in (0, 1):
                to = builder.inttoptr(after(builder, out, 64 * half), SUMS.as_pointer())
                builder.store(own[half], to, align=4)
            out = builder.add(out, out_stride)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


@intrinsic
def _mixed(typing, weights, stride, panel, pairs, shares, out, out_stride):
    """out[ROWS, 32] = weights · panel, each row times its share, rounded to bf16; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        weights, stride, panel, pairs, shares, out, out_stride = args
        rounding = declare(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ROUNDED, SUMS)
        zero = ir.Constant(SUMS, [0.0] * 16)
        for row, own in enumerate(accumulate(builder, ROWS, weights, stride, panel, pairs, [zero, zero])):
            share = spread(builder, load(builder, F32, after(builder, shares, 4 * row), 4))
            for half in (0, 1):
                to = builder.inttoptr(after(builder, out, 32 * half), ROUNDED.as_pointer())
                builder.store(builder.call(rounding, [builder.fmul(own[half], share)]), to, align=2)
            out = builder.add(out, out_stride)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 7)), codegen


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
def _powers(typing, scores, chunks, scale, top, out):
    """out = 2^(scale · score − top) as bf16, for 32 · chunks fp32 scores; returns their sum."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return ir.Constant(F32, 0.0)
        scores, chunks, scale, top, out = args
        fma = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
        nearest = declare(builder, "llvm.rint.v16f32", SUMS, SUMS)
        scalef = declare(
            builder, "llvm.x86.avx512.mask.scalef.ps.512", SUMS, SUMS, SUMS, SUMS, ir.IntType(16), I32
        )
        rounding = declare(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ROUNDED, SUMS)
        factor, minus_top = spread(builder, scale), spread(builder, builder.fneg(top))
        powers = [ir.Constant(SUMS, [power] * 16) for power in _POWERS]
        everywhere, no_rounding = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)

        def body(index, values):
            at = builder.add(scores, builder.mul(index, ir.Constant(I64, 128)))
            to = builder.add(out, builder.mul(index, ir.Constant(I64, 64)))
            sums = []
            for half, value in enumerate(values):
                score = load(builder, SUMS, after(builder, at, 64 * half), 4)
                exponent = builder.call(fma, [score, factor, minus_top])
                whole = builder.call(nearest, [exponent])
                rest = builder.fsub(exponent, whole)
                power = powers[0]
                for following in powers[1:]:
                    power = builder.call(fma, [power, rest, following])
                power = builder.call(scalef, [power, whole, power, everywhere, no_rounding])
                target = builder.inttoptr(after(builder, to, 32 * half), ROUNDED.as_pointer())
                builder.store(builder.call(rounding, [power]), target, align=2)
                sums.append(builder.fadd(value, power))
            return sums

        zero = ir.Constant(SUMS, [0.0] * 16)
        one, two = _loop(builder, chunks, [zero, zero], body)
        reduce = declare(builder, "llvm.vector.reduce.fadd.v16f32", F32, F32, SUMS)
        return builder.call(reduce, [ir.Constant(F32, 0.0), builder.fadd(one, two)], fastmath=["reassoc"])

    return types.float32(types.int64, types.int64, types.float32, types.float32, types.int64), codegen


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
def _softmax(scores, width, weights, begin, end, scale):
    """Weights of one row before their division by the sum, which is returned. Keys outside [begin, end) get 0."""
    row = floats(scores)
    for i in range(begin):
        row[i] = _HIDDEN
    for i in range(end, width):
        row[i] = _HIDDEN
    chunks = width // PANEL
    top = _most(scores, chunks)
    return _powers(scores, chunks, scale, top * scale, weights)


@compiled
def attend_prompt(
    q, q_stride, out, out_stride, rows, begin, tokens, dim8, group, window, scale, panels, first, last
):  # fmt: skip
    """The heads [first, last): `rows` ≥ 12 queries each, the first at position `begin`, of `tokens` keys in `panels`.

    q and out are [row, head, dim] with strides in bytes between rows.
    """
    dim = 8 * len(dim8)
    whole = (tokens + PANEL - 1) // PANEL * PANEL
    scores = np.empty((ROWS, whole), np.float32)
    weights = np.empty((ROWS, whole), np.uint16)
    shares = np.empty(ROWS, np.float32)
    factor = np.float32(scale) * _LOG2E
    to_scores, to_weights = np.int64(scores.ctypes.data), np.int64(weights.ctypes.data)
    to_shares = np.int64(shares.ctypes.data)
    for head in range(first, last):
        keys = panels + head // group * whole * dim * 4
        values = keys + whole * dim * 2
        for tile in range((rows + ROWS - 1) // ROWS):
            row = min(tile * ROWS, rows - ROWS)  # the last tile computes some rows again
            at = begin + row
            low = max(0, at + 1 - window) // PANEL if window else 0
            high = (at + ROWS + PANEL - 1) // PANEL
            width = (high - low) * PANEL
            here = q + row * q_stride + head * dim * 2
            for panel in range(low, high):
                _scores(
                    here, q_stride, keys + panel * dim * 64, dim // 2,
                    to_scores + (panel - low) * PANEL * 4, whole * 4,
                )  # fmt: skip
            for i in range(ROWS):
                mine = at + i - low * PANEL
                oldest = max(0, mine + 1 - window) if window else 0
                total = _softmax(
                    to_scores + i * whole * 4, width, to_weights + i * whole * 2,
                    oldest, mine + 1, factor,
                )  # fmt: skip
                shares[i] = np.float32(1.0) / total
            for panel in range(dim // PANEL):
                _mixed(
                    to_weights, whole * 2,
                    values + (panel * whole + low * PANEL) * 64, width // 2, to_shares,
                    out + row * out_stride + (head * dim + panel * PANEL) * 2, out_stride,
                )  # fmt: skip
    _keep(scores)
    _keep(weights)
    _keep(shares)
