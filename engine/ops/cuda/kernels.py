"""A layer's small operations for CUDA: a launch each. Importing it needs Triton.

Sums and products are fp32; results are rounded to the tensors' dtype once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.kv_codes import as_scales, scales_of, whole


@triton.jit
def norm_rows(x, delta, weight, out, width, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    """A program per row: x += delta if it ADDS, then the RMS norm."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total = row + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(x.dtype.element_ty)
        tl.store(x + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / width + eps)
    result = row * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(
    gate_up, out, inner, BLOCK: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):
    """A program per row and block of columns. With LIMIT > 0 it is the clamped SwiGLU of LayerOps.gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * 2 * inner + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # NaN stays NaN; tl.minimum would return the limit
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    steep = gate * ALPHA  # x · sigmoid(x) is silu
    if GELU:  # and x · sigmoid(2u) gelu by tanh
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(steep))  # never overflows
    result = gate * tl.where(steep < 0.0, small, 1.0) / (1.0 + small) * up
    tl.store(out + row * inner + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def multiply_row(
    x, weight, bias, out, outputs, inputs, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIASED: tl.constexpr
):
    """out [1, outputs] = x [1, inputs] times weight [outputs, inputs] transposed. A program per ROWS rows of the weight,
    which are read once, in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = row < outputs
    at = weight + row.to(tl.int64)[:, None] * inputs + column[None, :]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, inputs, COLUMNS):
        inside = first + column < inputs
        w = tl.load(at + first, mask=there[:, None] & inside[None, :], other=0.0).to(tl.float32)
        v = tl.load(x + first + column, mask=inside, other=0.0).to(tl.float32)
        sums += w * v[None, :]
    result = tl.sum(sums, 1)
    if BIASED:
        result += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _norm_weights(q_norm, k_norm, of_query, column, there):
    """[heads, columns], in float32: of the queries' norm, or of the keys'."""
    for_queries = tl.load(q_norm + column, mask=there, other=0.0)[None, :]
    for_keys = tl.load(k_norm + column, mask=there, other=0.0)[None, :]
    return tl.where(of_query, for_queries, for_keys).to(tl.float32)


@triton.jit
def rotate_heads(
    qkv, cache, cos, sin, q_norm, k_norm, positions, slots, eps, block_stride, value_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, NORMS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program per token and TOGETHER heads of qkv [tokens, HEADS + 2 · KV_HEADS, DIM]: norm, rotation in place, the
    cache.

    `cache`: the layer's keys of the first block; ROW: elements for each token of a head, more than DIM if they are codes
    and a scale. What is quantised is also written back. Halves of a head are rotated against each other.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    half: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF_WIDTH)
    within = column < half
    inside = (head < all_heads)[:, None] & within[None, :]
    at = qkv + (token * all_heads + head)[:, None] * DIM + column[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    turned = (head < HEADS + KV_HEADS)[:, None]
    new_low, new_high = low, high
    if NORMS:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM + eps)[:, None]
        of_query = (head < HEADS)[:, None]
        new_low = low * scale * _norm_weights(q_norm, k_norm, of_query, column, within)
        new_high = high * scale * _norm_weights(q_norm, k_norm, of_query, half + column, within)
    angle = tl.load(positions + token) * half + column
    c = tl.load(cos + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=within, other=0.0).to(tl.float32)[None, :]
    new_low, new_high = new_low * c - new_high * s, new_high * c + new_low * s
    dtype: tl.constexpr = qkv.dtype.element_ty
    new_low, new_high = tl.where(turned, new_low, low).to(dtype), tl.where(turned, new_high, high).to(dtype)
    is_kept = head >= HEADS
    kept = inside & is_kept[:, None]
    is_value = (head >= HEADS + KV_HEADS).to(tl.int64)
    kv_head = head - HEADS - is_value * KV_HEADS
    slot = tl.load(slots + token)
    plane = cache + slot // PAGE * block_stride + is_value * value_offset + kv_head * (PAGE * ROW)
    to = (plane + slot % PAGE * DIM)[:, None] + column[None, :]
    if ROW > DIM:
        exact_low, exact_high = new_low.to(tl.float32), new_high.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(exact_low), 1), tl.max(tl.abs(exact_high), 1))
        poison = tl.sum(exact_low - exact_low, 1) + tl.sum(exact_high - exact_high, 1)
        bits, scale, factor = scales_of(top, poison)
        code_low, code_high = whole(exact_low, factor[:, None]), whole(exact_high, factor[:, None])
        tl.store(to, code_low.to(tl.int8), mask=kept)
        tl.store(to + half, code_high.to(tl.int8), mask=kept)
        at_scales = as_scales(plane + PAGE * DIM + slot % PAGE * (ROW - DIM))
        tl.store(at_scales, bits, mask=is_kept & (head < all_heads))
        new_low = tl.where(kept, (code_low * scale[:, None]).to(dtype), new_low)
        new_high = tl.where(kept, (code_high * scale[:, None]).to(dtype), new_high)
        tl.store(at, new_low, mask=inside)
        tl.store(at + half, new_high, mask=inside)
    else:
        tl.store(at, new_low, mask=inside & turned)
        tl.store(at + half, new_high, mask=inside & turned)
        tl.store(to, new_low.to(cache.dtype.element_ty), mask=kept)
        tl.store(to + half, new_high.to(cache.dtype.element_ty), mask=kept)
