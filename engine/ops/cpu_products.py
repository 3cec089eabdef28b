"""Products with bf16 weights by the CPU's own instruction for them (AVX512-BF16), compiled by numba.

A weight [outputs, inputs] is stored in panels of 32 outputs: [panel][pair of inputs][output][2], each panel one stream of
memory. A tile multiplies up to 12 rows with one panel: 24 sums stay in registers, two vectors of weights are read for
24 products. In decode every weight is read from memory once, and memory bandwidth is the limit; in a prompt as many rows
as fit the second-level cache stay there while all panels are read. The order of a row's sums does not depend on the
other rows.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor
from torch.nn import functional as F

from cluster.process import huge_pages
from engine.ops.cpu_llvm import (
    F32,
    I32,
    I64,
    after,
    compiled,
    counted,
    declare,
    integers,
    keep,
    load,
    prefetch,
    spread,
)
from engine.ops.cpu_tiles import (
    PANEL_STRIDE,
    TILE_ROWS,
    begin_tiles,
    end_tiles,
    packed_tiles,
    packed_tiles_onto,
    stream_tiles,
)
from engine.ops.cpu_tiles import supported as tiles_supported

PANEL = 32
MOST_ROWS = 12
# Rows that are computed together, beside a panel in a cache of 1 MiB; measured from 128 to 768 KiB. Without a limit long
# rows are read from the third level for each panel, a tenth slower.
_ROWS_BYTES = 384 << 10
_AHEAD_BYTES = 4096  # of the stream of weights: hardware prefetchers stop at the end of a page
_PAIR_BYTES = PANEL * 2 * 2
SUMS = ir.VectorType(F32, 16)
TILE_INPUTS = 32  # of a step of AMX
_STEP_BYTES = TILE_INPUTS * PANEL * 2
_SLICE_STEPS = 16  # 32 KiB of a panel, which stay in a first-level cache of 48 KiB
_SUMS_BYTES = TILE_ROWS * PANEL_STRIDE
_TILED_ROWS_BYTES = 1 << 20  # CPUs with AMX have second-level caches of 2 MiB


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
    """bf16 [outputs, inputs], inputs even → its panels, in huge pages: processors
    prefetch within a page only (docs/adr/0141)."""
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, inputs // 2, 2).transpose(1, 2)
    size = panels.numel() * panels.element_size()
    memory = huge_pages.zeroed(size) if area is None else area.take(size)
    return torch.frombuffer(memory, dtype=panels.dtype).view(panels.shape).copy_(panels)


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
    """The loop of a tile: count × 32 sums, two vectors a row, from `starts` on. `builder` ends after it."""
    product = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", SUMS, SUMS, WEIGHTS, WEIGHTS)
    sources = [x]
    for _ in range(count - 1):
        sources.append(builder.add(sources[-1], x_stride))
    entry, loop, done = builder.block, builder.append_basic_block("pair"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(I64)
    pair.add_incoming(ir.Constant(I64, 0), entry)
    sums = [[builder.phi(SUMS) for _ in (0, 1)] for _ in range(count)]
    at = builder.add(weights, builder.mul(pair, ir.Constant(I64, _PAIR_BYTES)))
    halves = [load(builder, WEIGHTS, after(builder, at, 64 * half), 4) for half in (0, 1)]
    for half in (0, 1):
        prefetch(builder, after(builder, at, _AHEAD_BYTES + 64 * half))
    offset = builder.mul(pair, ir.Constant(I64, 4))
    for source, own, start in zip(sources, sums, starts, strict=True):
        both = builder.bitcast(
            spread(builder, load(builder, I32, after(builder, source, offset), 2)), WEIGHTS
        )
        for half in (0, 1):
            total = builder.call(product, [own[half], both, halves[half]])
            own[half].add_incoming(start[half], entry)
            own[half].add_incoming(total, loop)
            own[half] = total
    following = builder.add(pair, ir.Constant(I64, 1))
    pair.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, pairs), loop, done)
    builder.position_at_end(done)
    return sums


@intrinsic
def _tile(typing, rows, x, x_stride, weights, pairs, bias, out, out_stride, columns):
    """out[rows ≤ MOST_ROWS, columns ≤ 32] = x · panel + bias; addresses, strides in bytes. Each number of rows has code
    of its own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        if not has_instruction():  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        rows, x, x_stride, weights, pairs, bias, out, out_stride, columns = args
        done = builder.append_basic_block("tile_done")
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            form = builder.append_basic_block("tile")
            choice.add_case(ir.Constant(I64, count), form)
            builder.position_at_end(form)
            starts = [load(builder, SUMS, after(builder, bias, 64 * half), 4) for half in (0, 1)]
            sums = accumulate(builder, count, x, x_stride, weights, pairs, [starts] * count)
            _store_rows(builder, sums, out, out_stride, columns)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 9)), codegen


def _store_rows(builder, sums, out, out_stride, columns):
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


@intrinsic
def _round_rows(typing, sums, count, bias, out, out_stride, columns):
    """Add the bias to `count` rows of a tile's sums, and store them in bf16."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        sums, count, bias, out, out_stride, columns = args
        parts = [load(builder, SUMS, after(builder, bias, 64 * half), 4) for half in (0, 1)]
        with counted(builder, ir.Constant(I64, 0), count) as row:
            at = after(builder, sums, builder.mul(row, ir.Constant(I64, PANEL_STRIDE)))
            own = [
                builder.fadd(load(builder, SUMS, after(builder, at, 64 * half), 4), parts[half])
                for half in (0, 1)
            ]
            _store_rows(
                builder, [own], after(builder, out, builder.mul(row, out_stride)), out_stride, columns
            )
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


def by_tiles(inputs: int) -> bool:
    """Whether rows of so many inputs are multiplied by AMX, however many: so the order of a row's sums does not depend on
    what is computed beside it."""
    return inputs % TILE_INPUTS == 0 and tiles_supported()


@njit(inline="always")
def _pack_rows(x, rows, stride, to):
    """[rows, inputs] → [16 rows][32 inputs][row], in groups of 32 rows; what lies behind the last row is anything."""
    for row in range(rows):
        source = integers(x + row * stride)
        target = integers(to + row // 16 * 16 * stride + row % 16 * 64)
        for step in range(stride // 64):
            for word in range(8):
                target[step * 128 + word] = source[step * 8 + word]


@njit(inline="always")
def _stream_by_tiles(x, rows, inputs, panels, bias, out, outputs, first, last):
    """Up to 32 rows: the panels come from memory."""
    stride = inputs * 2
    buffer = np.empty(_SUMS_BYTES + TILE_ROWS * stride + 128, np.uint8)
    sums = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    own, own_stride = x, 0
    if rows > 1:  # a tile reads 32 rows
        own, own_stride = sums + _SUMS_BYTES, stride
        source, to = integers(x), integers(own)
        for word in range(rows * stride // 8):
            to[word] = source[word]
    begin_tiles()
    for panel in range(first, last):
        stream_tiles(own, own_stride, panels + panel * inputs * 64, inputs // 2, sums, PANEL_STRIDE)
        _round_rows(
            sums, rows, bias + panel * 128, out + panel * PANEL * 2, outputs * 2,
            min(outputs - panel * PANEL, PANEL),
        )  # fmt: skip
    end_tiles()
    keep(buffer)


@njit(inline="always")
def _multiply_by_tiles(x, rows, inputs, panels, bias, out, outputs, first, last):
    """A tile's sums lie in memory between slices of the inputs, so that a slice of a panel stays in the first-level cache
    while all rows pass."""
    stride, steps = inputs * 2, inputs // TILE_INPUTS
    slices = (steps + _SLICE_STEPS - 1) // _SLICE_STEPS
    together = max(TILE_ROWS, _TILED_ROWS_BYTES // stride // TILE_ROWS * TILE_ROWS)
    blocks = (rows + together - 1) // together
    most = (rows + TILE_ROWS - 1) // TILE_ROWS // blocks + 1
    buffer = np.empty(most * (_SUMS_BYTES + TILE_ROWS * stride) + 64, np.uint8)
    kept = (np.int64(buffer.ctypes.data) + 63) // 64 * 64
    packed = kept + most * _SUMS_BYTES
    begin_tiles()
    all_tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    for block in range(blocks):
        begin, end = all_tiles * block // blocks, all_tiles * (block + 1) // blocks
        top, tall = begin * TILE_ROWS, end - begin
        here = min(rows - top, tall * TILE_ROWS)
        _pack_rows(x + top * stride, here, stride, packed)
        lines = (PANEL + tall - 1) // tall
        for panel in range(first, last):
            weights = panels + panel * inputs * 64
            ahead = weights + inputs * 64
            for part in range(slices):
                low, high = steps * part // slices, steps * (part + 1) // slices
                at, pairs = weights + low * _STEP_BYTES, (high - low) * 16
                for tile in range(tall):
                    own, sums = packed + tile * TILE_ROWS * stride + low * 1024, kept + tile * _SUMS_BYTES
                    if part == 0:
                        packed_tiles(own, 16 * stride, at, pairs, sums, ahead, lines)
                    else:
                        packed_tiles_onto(own, 16 * stride, at, pairs, sums, ahead, lines)
                    ahead += lines * (high - low) * 64
            columns = min(outputs - panel * PANEL, PANEL)
            for tile in range(tall):
                row = top + tile * TILE_ROWS
                _round_rows(
                    kept + tile * _SUMS_BYTES, min(rows - row, TILE_ROWS), bias + panel * 128,
                    out + (row * outputs + panel * PANEL) * 2, outputs * 2, columns,
                )  # fmt: skip
    end_tiles()
    keep(buffer)


@compiled
def multiply(x, rows, inputs, panels, bias, out, outputs, tiled, first, last):
    """out[rows, outputs] = x[rows, inputs] · Wᵀ + bias, for panels [first, last). `tiled`: by AMX, see `by_tiles`."""
    if tiled and rows <= TILE_ROWS:
        _stream_by_tiles(x, rows, inputs, panels, bias, out, outputs, first, last)
        return
    if tiled:
        _multiply_by_tiles(x, rows, inputs, panels, bias, out, outputs, first, last)
        return
    together = max(MOST_ROWS, _ROWS_BYTES // (inputs * 2) // MOST_ROWS * MOST_ROWS)
    for top in range(0, rows, together):
        here = min(together, rows - top)
        tiles = (here + MOST_ROWS - 1) // MOST_ROWS
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
