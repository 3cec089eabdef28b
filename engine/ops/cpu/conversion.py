"""Parts of a hand-off that are rounded to int8 as they are written into the KV cache, compiled by numba: a pass over
memory, on the calling thread, without the interpreter's lock and without temporaries."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES
from engine.ops.cpu.codegen.elements import kind_of, ptr, quantize_row
from engine.ops.cpu.codegen.llvm import cached, halves, integers


@functools.lru_cache(None, typed=True)  # 0 and 0.0 are two kinds
def kernel_of(kind: int | float) -> Any:
    def convert(numbers, blocks, ids, offset, tokens, layers, heads, page, dim, block, layer, side, head):
        rows = ptr(numbers, kind)
        of_block = integers(ids)
        at, done, number = 0, 0, 0
        while done < tokens:
            first = offset if number == 0 else 0
            last = min(page, first + tokens - done)
            to_block = blocks + of_block[number] * block
            for of_layer in range(layers):
                for which in range(2):
                    for of_head in range(heads):
                        to = to_block + of_layer * layer + which * side + of_head * head
                        scales = halves(to + page * dim)
                        for token in range(first, last):
                            quantize_row(rows, at, ptr(to + token * dim, False), scales, token, dim)
                            at += dim
            done += last - first
            number += 1

    return cached(convert, kind)


def write_part(blocks: Tensor, numbers: Tensor, ids: Tensor, offset: int) -> None:
    """As engine/kv_blocks.py does, to the last bit."""
    _, layers, _, heads, page, row = blocks.shape
    dim = row - SCALE_BYTES
    tokens = numbers.numel() // (layers * 2 * heads * dim)
    kernel_of(kind_of(numbers.dtype))(
        numbers.data_ptr(), blocks.data_ptr(), ids.data_ptr(), offset, tokens, layers, heads, page, dim,
        *blocks.stride()[:4],
    )  # fmt: skip
