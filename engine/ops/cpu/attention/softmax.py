"""The softmax of prompts.py: over rows of fp32 scores, in blocks of keys.

e^x is 2^n · p(r) with a polynomial of degree 3, exact to 8e-5: a twentieth of the error of rounding to bf16 (algorithm:
Cody and Waite's reduction, as in any libm; coefficients by Remez' exchange for the relative error over |r| ≤ ½).
"""

from __future__ import annotations

from functools import partial, reduce

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import F32, I32, I64, after, declare, load, reduced, repeated, spread
from engine.ops.cpu.products.bf16 import SUMS, WEIGHTS, has_instruction

HIDDEN = np.float32(-1e30)  # finite: the difference of two infinities is no number
LOWEST = np.float32(-1e20)  # base of a row that has seen no key: hidden ones have weight 0 beside it
_POWERS = (0.05517167, 0.24261112, 0.69326097, 0.99992806)
_EXACT_POWERS = (0.00133952, 0.00967017, 0.05550327, 0.24022098, 0.69314718, 1.0)  # few of them are computed


def _larger(builder, one, other):
    """One instruction; llvm.maxnum is three, to skip NaN. A NaN among the scores makes the row NaN by its weight."""
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


def _most_of(vectors):
    """An intrinsic: the greatest of 16 · vectors · chunks fp32 numbers."""

    @intrinsic
    def most(typing, scores, chunks):
        def codegen(context, builder, signature, args):
            scores, chunks = args

            def body(index, values):
                at = builder.add(scores, builder.mul(index, ir.Constant(I64, 64 * vectors)))
                return [
                    _larger(builder, load(builder, SUMS, after(builder, at, 64 * part), 4), value)
                    for part, value in enumerate(values)
                ]

            start = ir.Constant(SUMS, [float(HIDDEN)] * 16)
            larger = partial(_larger, builder)
            return reduced(
                builder, reduce(larger, repeated(builder, chunks, [start] * vectors, body)), larger
            )

        return types.float32(types.int64, types.int64), codegen

    return most


# By vectors of 16 per turn of the loop: the comparisons of two do not wait for each other.
most_by_32, most_by_16 = _most_of(2), _most_of(1)


def _power_of_two(builder, exponent, coefficients):
    fma = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
    nearest = declare(builder, "llvm.rint.v16f32", SUMS, SUMS)
    bits = ir.IntType(16)
    scalef = declare(builder, "llvm.x86.avx512.mask.scalef.ps.512", SUMS, SUMS, SUMS, SUMS, bits, I32)
    whole = builder.call(nearest, [exponent])
    rest = builder.fsub(exponent, whole)
    first, *others = (ir.Constant(SUMS, [one] * 16) for one in coefficients)
    power = first
    for one in others:
        power = builder.call(fma, [power, rest, one])
    everywhere, no_rounding = ir.Constant(bits, -1), ir.Constant(I32, 4)
    return builder.call(scalef, [power, whole, power, everywhere, no_rounding])


@intrinsic
def bases(typing, largest, vectors, scale, tops, fades):
    """Bases of the softmax after a block, for 16 · vectors rows: tops = max(tops, scale · largest); fades: factors of sums
    of earlier blocks. Returns 0 if all are 1."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return ir.Constant(I64, 0)
        largest, vectors, scale, tops, fades = args
        factor, one = spread(builder, scale), ir.Constant(SUMS, [1.0] * 16)

        def body(index, values):
            offset = builder.mul(index, ir.Constant(I64, 64))
            places = [builder.add(address, offset) for address in (largest, tops, fades)]
            old = load(builder, SUMS, places[1], 4)
            new = _larger(builder, builder.fmul(load(builder, SUMS, places[0], 4), factor), old)
            grows = builder.fcmp_ordered(">", new, old)
            power = _power_of_two(builder, builder.fsub(old, new), _EXACT_POWERS)
            for value, place in ((new, places[1]), (builder.select(grows, power, one), places[2])):
                builder.store(value, builder.inttoptr(place, SUMS.as_pointer()), align=4)
            mask = builder.zext(builder.bitcast(grows, ir.IntType(16)), I64)
            return [builder.or_(values[0], mask)]

        return repeated(builder, vectors, [ir.Constant(I64, 0)], body)[0]

    return types.int64(types.int64, types.int64, types.float32, types.int64, types.int64), codegen


@intrinsic
def fade_row(typing, row, chunks, fade):
    """row *= fade, for 32 · chunks numbers."""

    def codegen(context, builder, signature, args):
        row, chunks, fade = args
        factor = spread(builder, fade)

        def body(index, values):
            for half in (0, 1):
                at = builder.add(row, builder.mul(index, ir.Constant(I64, 128)))
                place = after(builder, at, 64 * half)
                product = builder.fmul(load(builder, SUMS, place, 4), factor)
                builder.store(product, builder.inttoptr(place, SUMS.as_pointer()), align=4)
            return values

        repeated(builder, chunks, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@intrinsic
def powers(typing, scores, chunks, scale, top, out, fade, sums):
    """out = 2^(scale · score − top) as bf16, for 32 · chunks fp32 scores; sums[16] = fade · sums + theirs."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        scores, chunks, scale, top, out, fade, sums = args
        fma = declare(builder, "llvm.fma.v16f32", SUMS, SUMS, SUMS, SUMS)
        factor, minus_top = spread(builder, scale), spread(builder, builder.fneg(top))

        def body(index, values):
            at = builder.add(scores, builder.mul(index, ir.Constant(I64, 128)))
            found = [
                _power_of_two(
                    builder,
                    builder.call(
                        fma, [load(builder, SUMS, after(builder, at, 64 * half), 4), factor, minus_top]
                    ),
                    _POWERS,
                )
                for half in (0, 1)
            ]
            _store_rounded(builder, found, builder.add(out, builder.mul(index, ir.Constant(I64, 64))))
            return [builder.fadd(value, power) for value, power in zip(values, found, strict=True)]

        before = builder.fmul(load(builder, SUMS, sums, 4), spread(builder, fade))
        one, two = repeated(builder, chunks, [before, ir.Constant(SUMS, [0.0] * 16)], body)
        builder.store(builder.fadd(one, two), builder.inttoptr(sums, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    i64, f32 = types.int64, types.float32
    return types.void(i64, i64, f32, f32, i64, f32, i64), codegen


@intrinsic
def divide(typing, mixed, chunks, sums, out):
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

        repeated(builder, chunks, [], body)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


def _store_rounded(builder, halves, address):
    """32 fp32 numbers as bf16."""
    rounding = declare(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", WEIGHTS, SUMS, SUMS)
    rounded = builder.call(rounding, [halves[1], halves[0]])
    builder.store(rounded, builder.inttoptr(address, WEIGHTS.as_pointer()), align=2)
