"""A layer's small operations for CUDA: a launch each. Importing it needs Triton.

Sums and products are fp32; results are rounded to the tensors' dtype once.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    """A program per row and block of columns. With a LIMIT both are clamped, and 1 is added to up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = gate_up + row * 2 * inner + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    steep = gate * ALPHA  # x · sigmoid(x) is silu
    if GELU:  # and x · sigmoid(2u) gelu by tanh
        steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(steep))  # never overflows
    result = gate * tl.where(steep < 0.0, small, 1.0) / (1.0 + small) * up
    tl.store(out + row * inner + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotate_heads(
    qkv, cache, cos, sin, q_norm, k_norm, positions, slots, eps, block_stride, value_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF_WIDTH: tl.constexpr,
    PAGE: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """A program per token and head of qkv [tokens, HEADS + 2 · KV_HEADS, DIM]: norm, rotation in place, the cache.

    `cache`: the layer's keys of the first block. Halves of a head are rotated against each other.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF_WIDTH)
    inside = column < half
    at = qkv + (token * tl.num_programs(1) + head) * DIM + column
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            weight = (q_norm if head < HEADS else k_norm) + column
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
            low = low * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
            high = high * scale * tl.load(weight + half, mask=inside, other=0.0).to(tl.float32)
        angle = tl.load(positions + token) * half + column
        c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        low, high = low * c - high * s, high * c + low * s
        tl.store(at, low.to(qkv.dtype.element_ty), mask=inside)
        tl.store(at + half, high.to(qkv.dtype.element_ty), mask=inside)
    if head >= HEADS:
        slot = tl.load(slots + token)
        is_value = (head >= HEADS + KV_HEADS).to(tl.int64)
        kv_head = head - HEADS - is_value * KV_HEADS
        to = cache + slot // PAGE * block_stride + is_value * value_offset
        to += (kv_head * PAGE + slot % PAGE) * DIM + column
        tl.store(to, low.to(cache.dtype.element_ty), mask=inside)
        tl.store(to + half, high.to(cache.dtype.element_ty), mask=inside)
