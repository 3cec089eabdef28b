"""Products of bf16 by AMX, the tile registers of some Intel CPUs. They have AVX512-BF16 too, at half the rate of fp32.

A register holds 16 rows of 64 bytes. A product of 32 rows with a panel (engine/ops/cpu_products) takes all eight:

    0 1 │ 2 3   sums: rows 0–15 and 16–31, columns 0–15 and 16–31
    4 5         the rows' next 32 inputs
    6 7         16 pairs of the panel's inputs, columns 0–15 and 16–31
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.ops.cpu_llvm import I64, after, declare

TILE_ROWS = 32
_I8 = ir.IntType(8)
_POINTER = _I8.as_pointer()
_REGISTER_ROWS, _ROW_BYTES = 16, 64
_PANEL_STRIDE = 128  # bytes of one pair of inputs
# Linux: programs ask before their threads get room for tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def has_instruction() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("amx-bf16"))


@functools.cache
def supported() -> bool:
    """Whether this CPU has the instructions and the kernel lets this process use them."""
    if not has_instruction() or not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _shape() -> list[int]:
    """What ldtilecfg reads (Intel's manual, volume 1, 18.2): palette 1; bytes of a row, then rows, of each register."""
    data = bytes([1, *[0] * 15, *[_ROW_BYTES, 0] * 8, *[0] * 16, *[_REGISTER_ROWS] * 8, *[0] * 8])
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, 64, 8)]


def _register(number: int) -> ir.Constant:
    return ir.Constant(_I8, number)


@intrinsic
def begin_tiles(typing):
    """Before `multiply_tiles`, in the same thread."""

    def codegen(context, builder, signature, args):
        if has_instruction():
            words = _shape()
            to = cgutils.alloca_once(builder, ir.ArrayType(I64, len(words)))
            builder.store(ir.Constant(ir.ArrayType(I64, len(words)), words), to)
            load = declare(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _POINTER)
            builder.call(load, [builder.bitcast(to, _POINTER)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def end_tiles(typing):
    """Leave nothing in the registers that the kernel would have to save when threads take turns."""

    def codegen(context, builder, signature, args):
        if has_instruction():
            builder.call(declare(builder, "llvm.x86.tilerelease", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _product(begins_with_zero: bool) -> Any:
    @intrinsic
    def multiply(typing, x, x_stride, panel, pairs, out, out_stride):
        def codegen(context, builder, signature, args):
            if has_instruction():
                _multiply(builder, begins_with_zero, *args)
            return context.get_dummy_value()

        return types.void(*([types.int64] * 6)), codegen

    return multiply


def _multiply(builder, begins_with_zero, x, x_stride, panel, pairs, out, out_stride):
    void = ir.VoidType()
    load = declare(builder, "llvm.x86.tileloadd64", void, _I8, _POINTER, I64)
    store = declare(builder, "llvm.x86.tilestored64", void, _I8, _POINTER, I64)
    zero = declare(builder, "llvm.x86.tilezero", void, _I8)
    product = declare(builder, "llvm.x86.tdpbf16ps", void, _I8, _I8, _I8)

    def call(function, number, address, stride):
        builder.call(function, [_register(number), builder.inttoptr(address, _POINTER), stride])

    lower = builder.mul(x_stride, ir.Constant(I64, _REGISTER_ROWS))
    lower_out = builder.add(out, builder.mul(out_stride, ir.Constant(I64, _REGISTER_ROWS)))
    sums = [(0, out), (1, after(builder, out, 64)), (2, lower_out), (3, after(builder, lower_out, 64))]
    for number, address in sums:
        if begins_with_zero:
            builder.call(zero, [_register(number)])
        else:
            call(load, number, address, out_stride)
    entry, loop, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(ir.Constant(I64, 0), entry)
    rows = after(builder, x, builder.mul(step, ir.Constant(I64, _ROW_BYTES)))
    columns = after(builder, panel, builder.mul(step, ir.Constant(I64, _REGISTER_ROWS * _PANEL_STRIDE)))
    stride = ir.Constant(I64, _PANEL_STRIDE)
    call(load, 6, columns, stride)
    call(load, 4, rows, x_stride)
    call(load, 7, after(builder, columns, 64), stride)
    call(load, 5, builder.add(rows, lower), x_stride)
    for number, (of_rows, of_columns) in enumerate([(4, 6), (4, 7), (5, 6), (5, 7)]):
        builder.call(product, [_register(number), _register(of_rows), _register(of_columns)])
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, loop)
    steps = builder.udiv(pairs, ir.Constant(I64, _REGISTER_ROWS))
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
    builder.position_at_end(done)
    for number, address in sums:
        call(store, number, address, out_stride)


# out[TILE_ROWS, 32] = x · panel, and out += x · panel; fp32; `pairs` a multiple of 16; addresses, strides in bytes
multiply_tiles, multiply_tiles_onto = _product(True), _product(False)
