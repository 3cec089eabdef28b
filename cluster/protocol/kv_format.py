"""How the KV of one head lies in a block, and in a part on the wire: K or V of one layer, `tokens` tokens.

    float32, bfloat16   [token][dim]
    int8                [token][dim] codes, then a bf16 scale for each token; a value is code · scale

Each is `tokens · row_bytes` long, so that a block is one span of bytes. `PAGE_MULTIPLE` aligns both planes of int8 to 16
bytes.
"""

from __future__ import annotations

from typing import NamedTuple

INT8 = "int8"
SCALE_BYTES = 2
PAGE_MULTIPLE = 8  # of int8
_WIDTHS = {"float32": 4, "bfloat16": 2}


class Plane(NamedTuple):
    """Numbers of the same kind, one row for each token."""

    before: int  # bytes for each token in the planes before this one
    row: int  # bytes for each token


def side(policy: str, *, of_decode: bool) -> str:
    """The format of one role. `policy`: one that all workers of a deployment share, or `prefill's>decode's`."""
    first, _, second = policy.partition(">")
    return second or first if of_decode else first


def dtype_name(kv_dtype: str, dtype: str) -> str:
    """The dtype of KV under the setting `kv_dtype` of one role, in a model that computes in `dtype`."""
    return INT8 if kv_dtype == INT8 else dtype


def row_bytes(kv_dtype: str, head_dim: int) -> int:
    """Bytes of one token in one head of one layer, K or V."""
    return head_dim + SCALE_BYTES if kv_dtype == INT8 else head_dim * _WIDTHS[kv_dtype]


def planes(row: int, *, quantized: bool) -> tuple[Plane, ...]:
    """`row`: as `row_bytes` says."""
    if not quantized:
        return (Plane(0, row),)
    return Plane(0, row - SCALE_BYTES), Plane(row - SCALE_BYTES, SCALE_BYTES)
