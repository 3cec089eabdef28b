"""Rows of a KV cache in int8 on CUDA: codes, and a bf16 scale for each row. Importing it needs Triton.

Codes and scales equal those of engine/kv_blocks.py to the last bit: divisions are rounded as IEEE 754 requires, and a
row's codes are its numbers times 1 / scale, rounded to the nearest. A compiler may fuse a product and a sum into one
operation, which rounds once: here a clamp is between them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine import kv_blocks
from engine.ops.cuda.interpreter import INTERPRETED

MOST = tl.constexpr(kv_blocks.MOST)
# Added to a float32 of less than 2^22, it leaves the nearest integer, ties to even.
ROUNDING = tl.constexpr(12582912.0)
NAN_BITS = tl.constexpr(0x7FC0)


@triton.jit
def scales_of(top, poison):
    """The scales of rows with these largest magnitudes: (bits of bf16, scales, 1 / scales). `poison`: NaN of a row that is
    not finite, else 0."""
    exact = tl.div_rn(top, tl.full(top.shape, MOST, tl.float32)) + poison
    bits = exact.to(tl.int32, bitcast=True)
    # To the nearest bf16, ties to even; exact is not negative. Of NaN only the sum could overflow.
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    bits = tl.where(exact >= 0.0, bits, NAN_BITS)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    some = scale > 0.0
    factor = tl.div_rn(tl.where(some, 1.0, 0.0), tl.where(some, scale, 1.0))
    return bits.to(tl.int16), scale, factor


@triton.jit
def whole(x, factor):
    """The codes of x, as float32."""
    code = x * factor
    code = tl.where(code >= -MOST, code, -MOST)
    code = tl.where(code <= MOST, code, MOST)
    return (code + ROUNDING) - ROUNDING


@triton.jit
def as_scales(address):
    """The addresses of scales at these addresses of a cache."""
    return address.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def load_scales(address, there, MASKED: tl.constexpr):
    """float32. MASKED: scales that are not `there` are 0, and are not read."""
    at = as_scales(address)
    bits = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def numbers(codes, like):
    """Convert codes to the dtype of `like`, in which all of them are exact."""
    return codes.to(tl.float32) if INTERPRETED else codes.to(like.dtype)
