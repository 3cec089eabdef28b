"""Parts of a hand-off that are rounded to int8 as they are written into the KV cache, in one launch. Importing it needs
Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES
from engine.ops.cuda.kv_codes import as_scales, scales_of, whole
from engine.ops.cuda.ops import OPTIONS

TOKENS = 16  # of one head in one block, by one program
WARPS = 4


@triton.jit(do_not_specialize=["offset", "tokens", "heads"])
def convert_blocks(
    numbers, blocks, ids, offset, tokens, heads, block_stride, layer_stride, side_stride, head_stride,
    DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program per block, [layer][K|V][head], and TOKENS tokens. `numbers`: a part, block by block; the first of `tokens`
    tokens is token `offset` of the first block."""
    index, plane, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.where(index == 0, offset, 0)
    last = tl.minimum(PAGE, offset + tokens - index * PAGE)
    token = first + group * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, WIDTH)
    mask = (token < last)[:, None] & (column < DIM)[None, :]
    before = tl.maximum(index * PAGE - offset, 0).to(tl.int64)  # tokens of the part in earlier blocks
    row = before * tl.num_programs(1) + plane * (last - first) + (token - first)
    x = tl.load(numbers + row[:, None] * DIM + column[None, :], mask=mask, other=0.0).to(tl.float32)
    bits, _, factor = scales_of(tl.max(tl.abs(x), 1), tl.sum(x - x, 1))
    head, side, layer = plane % heads, plane // heads % 2, plane // heads // 2
    to = blocks + tl.load(ids + index) * block_stride + layer.to(tl.int64) * layer_stride
    to += side * side_stride + head * head_stride
    tl.store(to + token[:, None] * DIM + column[None, :], whole(x, factor[:, None]).to(tl.int8), mask=mask)
    tl.store(as_scales(to + PAGE * DIM + token * (ROW - DIM)), bits, mask=token < last)


def write_part(blocks: Tensor, numbers: Tensor, ids: Tensor, offset: int) -> None:
    """As engine/kv_blocks.py does, to the last bit."""
    _, layers, _, heads, page, row = blocks.shape
    dim, planes = row - SCALE_BYTES, layers * 2 * heads
    tokens = numbers.numel() // (planes * dim)
    convert_blocks[(triton.cdiv(offset + tokens, page), planes, triton.cdiv(page, TOKENS))](
        numbers, blocks, ids, offset, tokens, heads, *blocks.stride()[:4], DIM=dim, ROW=row,
        WIDTH=triton.next_power_of_2(dim), PAGE=page, TOKENS=TOKENS, num_warps=WARPS, **OPTIONS,
    )  # fmt: skip
