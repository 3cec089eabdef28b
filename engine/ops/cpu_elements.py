"""Elements in memory, as bf16 or fp32, and functions of them: what the CPU kernels for both dtypes share.

An element's `kind` is an int for bf16 and a float for fp32, so that numba compiles a kernel for each.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from engine.ops.cpu_llvm import as_f32, as_u32

F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.44269504088896341), F(0.693359375), F(-2.12194440e-4)
_EXP = tuple(F(c) for c in (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 0.166666655, 0.5))


def kind_of(dtype: torch.dtype) -> int | float:
    return 0 if dtype is torch.bfloat16 else 0.0


@intrinsic
def ptr(typing, address, kind):
    """A pointer to elements of `kind`."""
    element = types.uint16 if isinstance(kind, types.Integer) else types.float32

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(types.int64, kind), codegen


def load(pointer, index): ...


def store(pointer, index, value): ...


def element_size(kind): ...


@overload(load, inline="always")
def _load_of(pointer, index):
    if pointer.dtype is types.uint16:
        return lambda pointer, index: as_f32(np.uint32(pointer[index]) << np.uint32(16))
    return lambda pointer, index: pointer[index]


@overload(store, inline="always")
def _store_of(pointer, index, value):
    if pointer.dtype is types.uint16:

        def rounded(pointer, index, value):
            bits = as_u32(F(value))
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            pointer[index] = np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

        return rounded

    def plain(pointer, index, value):
        pointer[index] = F(value)

    return plain


@overload(element_size, inline="always")
def _size_of(kind):
    size = 2 if isinstance(kind, types.Integer) else 4
    return lambda kind: size


@intrinsic
def _two_to(typing, exponent):
    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        biased = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), codegen


@njit(inline="always")
def exp(x):
    """e^x, x ≤ 0, to one or two units in the last place (Cephes' expf). No floor, no 64-bit integers: it vectorises. NaN
    stays NaN."""
    finite = x if x > F(-87.0) else F(-87.0)  # the integer of a NaN is undefined
    x = F(-87.0) if x < F(-87.0) else x
    whole = np.int32(finite * _LOG2E - F(0.5))  # truncated towards zero: the nearest, as x is not positive
    n = F(whole)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = _EXP[0]
    y = y * r + _EXP[1]
    y = y * r + _EXP[2]
    y = y * r + _EXP[3]
    y = y * r + _EXP[4]
    y = y * r + _EXP[5]
    y = y * r * r + r + F(1.0)
    return y * _two_to(whole)
