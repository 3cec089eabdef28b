"""Elements in memory, as bf16 or fp32, and functions of them: what the CPU kernels for both dtypes share.

An element's `kind` is an int for bf16 and a float for fp32, so that numba compiles a kernel for each. That of a KV cache
may also be CODES: rows of int8, planes of which are followed by their scales (cluster/protocol/kv_format.py).
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

from cluster.protocol.kv_format import SCALE_BYTES
from engine.ops.cpu.codegen.llvm import as_f32, as_u32, compiled_exactly, halves, prefetch_line

F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.44269504088896341), F(0.693359375), F(-2.12194440e-4)
_EXP = tuple(F(c) for c in (1.98756915e-4, 1.39819995e-3, 8.33345191e-3, 4.16657959e-2, 0.166666655, 0.5))


CODES = False
_INFINITY = np.uint32(0x7F800000)  # its bits; those of NaN are larger


def kind_of(dtype: torch.dtype) -> int | float:
    if dtype is torch.int8:
        return CODES
    return 0 if dtype is torch.bfloat16 else 0.0


@intrinsic
def ptr(typing, address, kind):
    """A pointer to elements of `kind`."""
    if isinstance(kind, types.Boolean):
        element = types.int8
    else:
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
    if pointer.dtype is types.int8:
        return lambda pointer, index: F(pointer[index])
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
    if isinstance(kind, types.Boolean):
        return lambda kind: 1
    size = 2 if isinstance(kind, types.Integer) else 4
    return lambda kind: size


# --- rows of a KV cache -------------------------------------------------------------------------------------


def row_elements(kind, dim): ...


def store_row(kind, rows, at, cache, plane, page, offset, dim): ...


def scale_tokens(kind, block, coming, plane, kv, group, page, tokens, dim, weights): ...


@overload(row_elements, inline="always")
def _row_elements_of(kind, dim):
    """Elements of the cache for each token of one head, K or V."""
    if isinstance(kind, types.Boolean):
        return lambda kind, dim: dim + SCALE_BYTES
    return lambda kind, dim: dim


@overload(store_row, inline="always")
def _store_row_of(kind, rows, at, cache, plane, page, offset, dim):
    """Write the row at rows[at] as token `offset` of the head whose elements begin at cache[plane]; `cache`: an address.
    What is quantised is also written back, so that it attends to the same values as a later step."""
    if isinstance(kind, types.Boolean):

        def quantized(kind, rows, at, cache, plane, page, offset, dim):
            head = cache + plane
            codes = ptr(head + offset * dim, kind)
            scale = quantize_row(rows, at, codes, halves(head + page * dim), offset, dim)
            for i in range(dim):
                store(rows, at + i, load(codes, i) * scale)

        return quantized

    def copied(kind, rows, at, cache, plane, page, offset, dim):
        stored, to = ptr(cache, kind), plane + offset * dim
        for i in range(dim):
            stored[to + i] = rows[at + i]

    return copied


@compiled_exactly
def quantize_row(rows, at, codes, scales, token, dim):
    """As engine/kv_blocks.py does, to the last bit; returns the scale. A row that is not finite has the scale NaN.
    Magnitudes are compared by their bits, which have the same order: a maximum of floats is not vectorised."""
    top = np.uint32(0)
    for i in range(dim):
        bits = np.uint32(as_u32(load(rows, at + i)) & np.uint32(0x7FFFFFFF))
        top = bits if bits > top else top
    store(scales, token, as_f32(top) / F(127.0) if top < _INFINITY else F(np.nan))
    scale = load(scales, token)
    factor = F(1.0) / scale if scale > F(0.0) else F(0.0)
    for i in range(dim):
        code = np.rint(load(rows, at + i) * factor)
        code = code if code >= F(-127.0) else F(-127.0)
        code = code if code <= F(127.0) else F(127.0)
        codes[i] = np.int8(code)
    return scale


@overload(scale_tokens, inline="always")
def _scale_tokens_of(kind, block, coming, plane, kv, group, page, tokens, dim, weights):
    """weights[head, token] *= the token's scale, for the first `tokens` of a block; prefetches the scales of block
    `coming`. Both are addresses of the first of `kv` heads, `plane` elements each."""
    if not isinstance(kind, types.Boolean):
        return lambda kind, block, coming, plane, kv, group, page, tokens, dim, weights: None

    def scaled(kind, block, coming, plane, kv, group, page, tokens, dim, weights):
        for head in range(kv):
            at = head * plane + page * dim
            scales = halves(block + at)
            for line in range(0, page * SCALE_BYTES, 64):
                prefetch_line(coming + at + line)
            for g in range(head * group, head * group + group):
                for token in range(tokens):
                    weights[g, token] *= load(scales, token)

    return scaled


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
