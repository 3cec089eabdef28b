"""Products with bf16 weights by the CPU's own instruction for them (AVX512-BF16), compiled by numba. Those by AMX
are in tiles.py.

A weight [outputs, inputs] is stored in panels of 32 outputs: [panel][pair of inputs][output][2], each panel one stream of
memory. A tile multiplies up to 12 rows with one panel: 24 sums stay in registers, two vectors of weights are read for
24 products. In decode every weight is read from memory once, and memory bandwidth is the limit; in a prompt as many rows
as fit the second-level cache stay there while all panels are read. The order of a row's sums does not depend on the
other rows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from cluster.process import huge_pages
from engine.ops.cpu.codegen.llvm import (
    F32,
    I32,
    I64,
    accumulate_words,
    after,
    compiled,
    declare,
    each_count,
    load,
    spread,
)

PANEL = 32
MAX_ROWS = 12
# Rows that are computed together, beside a panel in a cache of 1 MiB; measured from 128 to 768 KiB. Without a limit long
# rows are read from the third level for each panel, a tenth slower.
_ROWS_BYTES = 384 << 10
PAIR_BYTES = PANEL * 2 * 2
SUMS = ir.VectorType(F32, 16)


def has_instruction() -> bool:
    """Whether this CPU has AVX512-BF16; those with AMX have it too."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


class Area:
    """Huge pages that several weights share, one after the other: the last page of each would be partly unused, which is a
    third of the memory where there are thousands of experts."""

    SIZE = 64 << 20  # what no weight takes of it is never backed by memory

    def __init__(self) -> None:
        self._left = memoryview(b"")

    def take(self, size: int) -> memoryview:
        if size > len(self._left):
            if size >= self.SIZE:
                return huge_pages.zeroed(size)
            self._left = huge_pages.zeroed(self.SIZE)
        taken, self._left = self._left[:size], self._left[-(-size // 64) * 64 :]
        return taken


def pack(weight: Tensor, area: Area | None = None) -> Tensor:
    """bf16 [outputs, inputs], inputs even → its panels, in huge pages: processors prefetch within a page only
    (docs/adr/0141). fp32 → panels [panel][input][output] (wide.py)."""
    outputs = weight.shape[0]
    # As words, in bf16 of two inputs, which torch moves five times as fast; a view of such needs memory of its own.
    padded = F.pad(weight, (0, 0, 0, -outputs % PANEL)).contiguous().view(torch.int32)
    words = padded.view(-1, PANEL, padded.shape[1]).transpose(1, 2)
    size = words.numel() * words.element_size()
    memory = huge_pages.zeroed(size) if area is None else area.take(size)
    packed = torch.frombuffer(memory, dtype=torch.int32).view(words.shape).copy_(words)
    each = packed.view(weight.dtype)
    return each if weight.dtype is torch.float32 else each.view(*words.shape, 2)


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: Any) -> str:
        return str(value)


_BFloat._create_instance()
WEIGHTS, ROUNDED = ir.VectorType(_BFloat(), 32), ir.VectorType(_BFloat(), 16)


def accumulate(builder, count, x, x_stride, weights, pairs, starts):
    """As `accumulate_words`, of pairs of bf16 numbers."""
    product = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, SUMS, WEIGHTS, WEIGHTS)
    return accumulate_words(builder, product, WEIGHTS, count, x, x_stride, weights, pairs, starts)


@intrinsic
def _tile(typing, rows, x, x_stride, weights, pairs, bias, out, out_stride, columns):
    """out[rows ≤ MAX_ROWS, columns ≤ 32] = x · panel + bias; addresses, strides in bytes. Each number of rows has code
    of its own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        if not has_instruction():  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        rows, x, x_stride, weights, pairs, bias, out, out_stride, columns = args
        for count in each_count(builder, rows, MAX_ROWS):
            starts = [load(builder, SUMS, after(builder, bias, 64 * half), 4) for half in (0, 1)]
            sums = accumulate(builder, count, x, x_stride, weights, pairs, [starts] * count)
            store_rows(builder, sums, out, out_stride, columns)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 9)), codegen


def store_rows(builder, sums, out, out_stride, columns):
    """Round to bf16 and store; columns beyond the matrix are not written."""
    lanes = ir.VectorType(I32, 16)
    bits = ir.VectorType(ir.IntType(1), 16)
    rounding = declare(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", ROUNDED, SUMS)
    pointer = ROUNDED.as_pointer()
    store = declare(builder, "llvm.masked.store.v16bf16.p0", ir.VoidType(), ROUNDED, pointer, I32, bits)
    width = builder.trunc(columns, I32)
    widths = spread(builder, width)
    masks = [
        builder.icmp_signed("<", ir.Constant(lanes, [16 * half + i for i in range(16)]), widths)
        for half in (0, 1)
    ]
    for own in sums:
        for half in (0, 1):
            to = builder.inttoptr(builder.add(out, ir.Constant(I64, 32 * half)), pointer)
            builder.call(store, [builder.call(rounding, [own[half]]), to, ir.Constant(I32, 2), masks[half]])
        out = builder.add(out, out_stride)


@compiled
def multiply(x, rows, inputs, panels, bias, out, outputs, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for panels [first, last)."""
    together = max(MAX_ROWS, _ROWS_BYTES // (inputs * 2) // MAX_ROWS * MAX_ROWS)
    for top in range(0, rows, together):
        here = min(together, rows - top)
        tiles = (here + MAX_ROWS - 1) // MAX_ROWS
        for panel in range(first, last):
            weights = panels + panel * inputs * 64
            columns = min(outputs - panel * 32, 32)
            b, to = bias + panel * 128, out + panel * 64
            for tile in range(tiles):
                begin = top + here * tile // tiles
                count = top + here * (tile + 1) // tiles - begin
                _tile(
                    count, x + begin * inputs * 2, inputs * 2, weights, inputs // 2, b,
                    to + begin * outputs * 2, outputs * 2, columns,
                )  # fmt: skip
