"""Products of int8 weights with int8 rows, by the CPU's instructions for them (AVX512-VNNI, AMX), compiled by numba.

A weight [outputs, inputs] is stored in panels of 32 outputs: [panel][four inputs][output][4], the layout of both
instructions; inputs are padded to 64 with weights of 0. Both multiply unsigned by signed bytes, so a row's codes are
stored with 128 added, and the sums begin with −128 times the sum of an output's weights. Sums are int32 and exact, so
both instructions, any tile and any number of ranks give equal sums. Beside the panels lies for every output: where its
sum begins, its scale, its bias.

    out = float(sum) · scale of the row · scale of the output + bias
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from torch import Tensor
from torch.nn import functional as F

from cluster.process import huge_pages
from engine.ops.cpu_llvm import (
    F32,
    I32,
    I64,
    after,
    as_f32,
    as_u32,
    compiled_exactly,
    declare,
    floats,
    halves,
    load,
    octets,
    prefetch,
    spread,
    words,
)

PANEL, STEP = 32, 64  # outputs of a panel; inputs are a multiple of STEP
MOST_ROWS = 12  # of a tile in vector registers
TILE_ROWS = 32  # of a tile in AMX's registers
_ROWS_BYTES = 384 << 10  # as in engine/ops/cpu_products
_AHEAD_BYTES = 4096
_QUAD_BYTES = PANEL * 4
_COLUMN_BYTES = 3 * PANEL * 4  # of a panel: starts, scales, biases
_SMALLEST = 1e-30  # as in engine/quant/int8.py
_I8, _I16 = ir.IntType(8), ir.IntType(16)
_POINTER = _I8.as_pointer()
_WORDS, _FLOATS, _HALVES = ir.VectorType(I32, 16), ir.VectorType(F32, 16), ir.VectorType(_I16, 16)
# Linux: programs ask before their threads get room for tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def supported() -> bool:
    """Whether this CPU has the vector instruction."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


def has_tiles() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-int8"))


@functools.cache
def tiles_supported() -> bool:
    """Whether this CPU has AMX and the kernel lets this process use it."""
    if not has_tiles() or not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def padded(inputs: int) -> int:
    return -(-inputs // STEP) * STEP


def pack(codes: Tensor, scales: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 [outputs, inputs], float32 [outputs] → panels in huge pages, and what lies beside them."""
    outputs, inputs = codes.shape
    whole = F.pad(codes, (0, padded(inputs) - inputs, 0, -outputs % PANEL))
    blocks = whole.view(-1, PANEL, whole.shape[1] // 4, 4).transpose(1, 2)
    memory = huge_pages.zeroed(blocks.numel())
    panels = torch.frombuffer(memory, dtype=torch.int8).view(blocks.shape).copy_(blocks)
    columns = torch.zeros(len(panels), 3, PANEL)
    starts = whole.sum(1, dtype=torch.int32).mul_(-128)
    columns.view(torch.int32)[:, 0] = starts.view(-1, PANEL)
    columns[:, 1] = F.pad(scales, (0, -outputs % PANEL)).view(-1, PANEL)
    if bias is not None:
        columns[:, 2] = F.pad(bias.float(), (0, -outputs % PANEL)).view(-1, PANEL)
    return panels, columns


# --- rows to int8 ---------------------------------------------------------------------------------------


@intrinsic
def _fma(typing, a, b, c):
    """One rounding, whatever the compiler may contract."""

    def codegen(context, builder, signature, args):
        return builder.call(declare(builder, "llvm.fma.f32", F32, F32, F32, F32), args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _bits(address, index, kind): ...


@overload(_bits, inline="always")
def _bits_of(address, index, kind):
    """A number's bits as float32."""
    if isinstance(kind, types.Integer):
        return lambda address, index, kind: np.uint32(halves(address)[index]) << np.uint32(16)
    return lambda address, index, kind: words(address)[index]


@compiled_exactly
def quantize(kind, x, width, codes, stride, scales, largest, first, last):
    """Rows [first, last): codes = round(x · 127 / largest) + 128, scales = largest · (1 / 127).

    `largest`: the address of each row's largest absolute value, float32; 0: it is that of this row. A row with a number
    that is not finite gets a scale that is not.
    """
    given, out_scales = floats(largest), floats(scales)
    for row in range(first, last):
        base = row * width
        if largest:
            top = given[row]
        else:
            most = np.uint32(0)
            for i in range(width):
                size = _bits(x, base + i, kind) & np.uint32(
                    0x7FFFFFFF
                )  # ordered as the values are; NaN above all
                most = size if size > most else most
            top = as_f32(most)
        inverse, scale = np.float32(127.0) / top, top * np.float32(1.0 / 127.0)
        if top < np.float32(_SMALLEST):
            inverse, scale = np.float32(0.0), np.float32(0.0)
        out_scales[row] = scale
        target = octets(codes + row * stride)
        for i in range(width):
            # 1.5 · 2²³ has steps of 1: the sum's low bits are the nearest integer, the even one of two.
            nearest = as_u32(_fma(as_f32(_bits(x, base + i, kind)), inverse, np.float32(12582912.0)))
            target[i] = np.uint8((nearest + np.uint32(128)) & np.uint32(0xFF))


# --- the product ------------------------------------------------------------------------------------------


def _store(builder, total, row_scale, scale, bias, kind, to, columns, half):
    """Scale 16 sums of a row, round and store those of existing columns."""
    value = builder.fmul(builder.fmul(builder.sitofp(total, _FLOATS), row_scale), scale)
    value = builder.fadd(value, bias)
    numbers = ir.Constant(_WORDS, [16 * half + i for i in range(16)])
    mask = builder.icmp_signed("<", numbers, spread(builder, columns))
    bits = ir.VectorType(ir.IntType(1), 16)
    if isinstance(kind, types.Integer):  # bf16, to the nearest even
        word = builder.bitcast(value, _WORDS)
        odd = builder.and_(builder.lshr(word, ir.Constant(_WORDS, [16] * 16)), ir.Constant(_WORDS, [1] * 16))
        word = builder.add(builder.add(word, ir.Constant(_WORDS, [0x7FFF] * 16)), odd)
        value = builder.trunc(builder.lshr(word, ir.Constant(_WORDS, [16] * 16)), _HALVES)
        name, vector, size = "llvm.masked.store.v16i16.p0", _HALVES, 2
    else:
        name, vector, size = "llvm.masked.store.v16f32.p0", _FLOATS, 4
    pointer = vector.as_pointer()
    store = declare(builder, name, ir.VoidType(), vector, pointer, I32, bits)
    at = builder.inttoptr(after(builder, to, 16 * size * half), pointer)
    builder.call(store, [value, at, ir.Constant(I32, size), mask])


def _beside(builder, beside):
    """For each half of a panel: where the sums begin, scales, biases."""
    return [
        (
            load(builder, _WORDS, after(builder, beside, 64 * half), 4),
            load(builder, _FLOATS, after(builder, beside, 128 + 64 * half), 4),
            load(builder, _FLOATS, after(builder, beside, 256 + 64 * half), 4),
        )
        for half in (0, 1)
    ]


@intrinsic
def _tile(typing, kind, rows, x, x_stride, weights, quads, beside, scales, out, out_stride, columns):
    """out[rows ≤ MOST_ROWS, columns ≤ 32] of a panel; addresses, strides in bytes. Each number of rows has code of its
    own, whose sums are registers."""

    def codegen(context, builder, signature, args):
        if not supported():  # compiled on every CPU, called only with it
            return context.get_dummy_value()
        _, rows, x, x_stride, weights, quads, beside, scales, out, out_stride, columns = args
        done = builder.append_basic_block("tile_done")
        width = builder.trunc(columns, I32)
        choice = builder.switch(rows, done)
        for count in range(1, MOST_ROWS + 1):
            form = builder.append_basic_block("tile")
            choice.add_case(ir.Constant(I64, count), form)
            builder.position_at_end(form)
            parts = _beside(builder, beside)
            sums = _accumulate(builder, count, x, x_stride, weights, quads, [part[0] for part in parts])
            to = out
            for row, own in enumerate(sums):
                factor = spread(builder, load(builder, F32, after(builder, scales, 4 * row), 4))
                for half, (_, scale, bias) in enumerate(parts):
                    _store(builder, own[half], factor, scale, bias, signature.args[0], to, width, half)
                to = builder.add(to, out_stride)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 10)), codegen


def _accumulate(builder, count, x, x_stride, weights, quads, starts):
    """The loop of a tile: count × 32 sums, two vectors a row, beginning with `starts`. `builder` ends after it."""
    product = declare(builder, "llvm.x86.avx512.vpdpbusd.512", _WORDS, _WORDS, _WORDS, _WORDS)
    sources = [x]
    for _ in range(count - 1):
        sources.append(builder.add(sources[-1], x_stride))
    entry, loop, done = builder.block, builder.append_basic_block("quad"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    quad = builder.phi(I64)
    quad.add_incoming(ir.Constant(I64, 0), entry)
    sums = [[builder.phi(_WORDS) for _ in (0, 1)] for _ in range(count)]
    at = builder.add(weights, builder.mul(quad, ir.Constant(I64, _QUAD_BYTES)))
    both = [load(builder, _WORDS, after(builder, at, 64 * half), 4) for half in (0, 1)]
    for half in (0, 1):
        prefetch(builder, after(builder, at, _AHEAD_BYTES + 64 * half))
    offset = builder.mul(quad, ir.Constant(I64, 4))
    for source, own in zip(sources, sums, strict=True):
        four = spread(builder, load(builder, I32, after(builder, source, offset), 4))
        for half in (0, 1):
            total = builder.call(product, [own[half], four, both[half]])
            own[half].add_incoming(starts[half], entry)
            own[half].add_incoming(total, loop)
            own[half] = total
    following = builder.add(quad, ir.Constant(I64, 1))
    quad.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, quads), loop, done)
    builder.position_at_end(done)
    return sums


# --- the product by AMX -----------------------------------------------------------------------------------
#
# A register holds 16 rows of 64 bytes. A tile of 32 rows and a panel takes all eight:
#     0 1 │ 2 3   sums: rows 0–15 and 16–31, columns 0–15 and 16–31
#     4 5         the rows' next 64 inputs
#     6 7         the panel's next 64 inputs, columns 0–15 and 16–31


def _shape() -> list[int]:
    """What ldtilecfg reads (Intel's manual, volume 1, 18.2): palette 1; bytes of a row, then rows, of each register."""
    data = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, 64, 8)]


@intrinsic
def _begin_tiles(typing):
    """Before `_amx_tile`, in the same thread."""

    def codegen(context, builder, signature, args):
        if has_tiles():
            words = _shape()
            to = cgutils.alloca_once(builder, ir.ArrayType(I64, len(words)))
            builder.store(ir.Constant(ir.ArrayType(I64, len(words)), words), to)
            configure = declare(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _POINTER)
            builder.call(configure, [builder.bitcast(to, _POINTER)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _end_tiles(typing):
    """Leave nothing in the registers that the kernel would have to save when threads take turns."""

    def codegen(context, builder, signature, args):
        if has_tiles():
            builder.call(declare(builder, "llvm.x86.tilerelease", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _amx_tile(typing, kind, x, x_stride, weights, steps, beside, scales, out, out_stride, columns):
    """out[TILE_ROWS, columns ≤ 32] of a panel; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if has_tiles():
            sums = cgutils.alloca_once(builder, ir.ArrayType(_WORDS, 2 * TILE_ROWS))
            sums.align = 64
            _amx_sums(builder, builder.ptrtoint(sums, I64), *args[1:6])
            _amx_store(builder, sums, signature.args[0], *args[5:])
        return context.get_dummy_value()

    return types.void(kind, *([types.int64] * 9)), codegen


def _amx_sums(builder, to, x, x_stride, weights, steps, beside):
    void = ir.VoidType()
    load_tile = declare(builder, "llvm.x86.tileloadd64", void, _I8, _POINTER, I64)
    store_tile = declare(builder, "llvm.x86.tilestored64", void, _I8, _POINTER, I64)
    product = declare(builder, "llvm.x86.tdpbusd", void, _I8, _I8, _I8)

    def register(number):
        return ir.Constant(_I8, number)

    def move(function, number, address, stride):
        builder.call(function, [register(number), builder.inttoptr(address, _POINTER), stride])

    lower = builder.mul(x_stride, ir.Constant(I64, 16))
    for number in range(4):  # all rows begin alike
        move(load_tile, number, after(builder, beside, 64 * (number % 2)), ir.Constant(I64, 0))
    entry, loop, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(ir.Constant(I64, 0), entry)
    rows = after(builder, x, builder.mul(step, ir.Constant(I64, STEP)))
    columns = after(builder, weights, builder.mul(step, ir.Constant(I64, STEP * PANEL)))
    stride = ir.Constant(I64, _QUAD_BYTES)
    move(load_tile, 6, columns, stride)
    move(load_tile, 4, rows, x_stride)
    move(load_tile, 7, after(builder, columns, 64), stride)
    move(load_tile, 5, builder.add(rows, lower), x_stride)
    for number, (of_rows, of_columns) in enumerate([(4, 6), (4, 7), (5, 6), (5, 7)]):
        builder.call(product, [register(number), register(of_rows), register(of_columns)])
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
    builder.position_at_end(done)
    for number in range(4):
        at = after(builder, to, 16 * _QUAD_BYTES * (number // 2) + 64 * (number % 2))
        move(store_tile, number, at, stride)


def _amx_store(builder, sums, kind, beside, scales, out, out_stride, columns):
    width = builder.trunc(columns, I32)
    parts = _beside(builder, beside)
    start = builder.ptrtoint(sums, I64)
    entry, loop, done = builder.block, builder.append_basic_block("row"), builder.append_basic_block("stored")
    builder.branch(loop)
    builder.position_at_end(loop)
    row = builder.phi(I64)
    row.add_incoming(ir.Constant(I64, 0), entry)
    at = after(builder, start, builder.mul(row, ir.Constant(I64, _QUAD_BYTES)))
    to = after(builder, out, builder.mul(row, out_stride))
    factor = spread(
        builder, load(builder, F32, after(builder, scales, builder.mul(row, ir.Constant(I64, 4))), 4)
    )
    for half, (_, scale, bias) in enumerate(parts):
        total = load(builder, _WORDS, after(builder, at, 64 * half), 4)
        _store(builder, total, factor, scale, bias, kind, to, width, half)
    following = builder.add(row, ir.Constant(I64, 1))
    row.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, ir.Constant(I64, TILE_ROWS)), loop, done)
    builder.position_at_end(done)


@compiled_exactly
def multiply(kind, codes, rows, inputs, panels, beside, scales, out, outputs, size, amx, first, last):
    """out[rows, outputs] of panels [first, last). `inputs` are padded; `size` bytes of a number of
    `out`; `amx`: use its registers for 32 rows and more."""
    least = TILE_ROWS if amx and rows >= TILE_ROWS else MOST_ROWS
    if least == TILE_ROWS:
        _begin_tiles()
    together = max(least, _ROWS_BYTES // inputs // least * least)
    for top in range(0, rows, together):
        here = min(together, rows - top)
        tiles = (here + least - 1) // least
        for panel in range(first, last):
            weights, own = panels + panel * inputs * PANEL, beside + panel * _COLUMN_BYTES
            columns, to = min(outputs - panel * PANEL, PANEL), out + panel * PANEL * size
            for tile in range(tiles):
                if least == TILE_ROWS:
                    # the last tile computes some rows again
                    begin = min(top + tile * TILE_ROWS, rows - TILE_ROWS)
                    _amx_tile(
                        kind, codes + begin * inputs, inputs, weights, inputs // STEP, own,
                        scales + begin * 4, to + begin * outputs * size, outputs * size, columns,
                    )  # fmt: skip
                else:
                    begin = top + here * tile // tiles
                    count = top + here * (tile + 1) // tiles - begin
                    _tile(
                        kind, count, codes + begin * inputs, inputs, weights, inputs // 4, own,
                        scales + begin * 4, to + begin * outputs * size, outputs * size, columns,
                    )  # fmt: skip
    if least == TILE_ROWS:
        _end_tiles()
