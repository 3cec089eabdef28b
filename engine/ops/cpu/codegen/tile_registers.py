"""Products by AMX, the tile registers of some Intel CPUs. They have AVX512-BF16 too, at half the rate of fp32.

A register holds 16 rows of 64 bytes. A product of 32 rows with a panel (engine/ops/cpu/products/bf16.py) takes all eight:

    0 1 │ 2 3   sums: rows 0–15 and 16–31, columns 0–15 and 16–31
    4 5         the rows' next 64 bytes: 32 inputs of bf16, 64 of int8
    6 7         the panel's next 16 lines of pairs (bf16) or fours (int8) of inputs, columns 0–15 and 16–31

A load takes 8 cycles from the first-level cache and a product 16, so four loads are hidden behind four products while
no more than half of them come from the second level (measured).
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import I64, after, declare

TILE_ROWS = 32
REGISTER_ROWS = 16
PANEL_STRIDE = 128  # bytes of the inputs that lie together, for a panel's 32 columns
BF16, INT8 = "amx-bf16", "amx-int8"
_I8 = ir.IntType(8)
_POINTER = _I8.as_pointer()
_ROW_BYTES = 64
_REGISTERS_OF_ROWS = (0, 1, 4), (2, 3, 5)  # the upper 16, the lower
# Linux: programs ask before their threads get room for tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def has_instruction(kind: str = BF16) -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get(kind))


@functools.cache
def supported(kind: str = BF16) -> bool:
    """Whether this CPU has the instructions and the kernel lets this process use them."""
    if not has_instruction(kind) or not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return bool(libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def _shape() -> list[int]:
    """The operand of ldtilecfg (Intel's manual, volume 1, 18.2), as words: palette 1; bytes of a row of each register. The
    seventh, their rows, is that of the panel's two registers."""
    data = bytes([1, *[0] * 15, *[_ROW_BYTES, 0] * 8, *[0] * 16, *[0] * 6, *[REGISTER_ROWS] * 2, *[0] * 8])
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, 64, 8)]


def _word(registers: Sequence[int]) -> ir.Constant:
    return ir.Constant(I64, sum(1 << 8 * number for number in registers))


@intrinsic
def begin_tiles(typing, upper, lower):
    """Before all products, in the same thread. A product is of `upper` + `lower` rows, 1 to 16 each."""

    def codegen(context, builder, signature, args):
        if has_instruction():
            words = [ir.Constant(I64, word) for word in _shape()]
            for rows, registers in zip(args, _REGISTERS_OF_ROWS, strict=True):
                words[6] = builder.add(words[6], builder.mul(rows, _word(registers)))
            to = cgutils.alloca_once(builder, ir.ArrayType(I64, len(words)))
            for at, word in enumerate(words):
                builder.store(word, cgutils.gep_inbounds(builder, to, 0, at))
            load = declare(builder, "llvm.x86.ldtilecfg", ir.VoidType(), _POINTER)
            builder.call(load, [builder.bitcast(to, _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def end_tiles(typing):
    """Leave nothing in the registers that the kernel would have to save when threads take turns."""

    def codegen(context, builder, signature, args):
        if has_instruction():
            builder.call(declare(builder, "llvm.x86.tilerelease", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), codegen


class Source(NamedTuple):
    """Where two registers are loaded from: addresses, bytes between their rows, bytes from step to step. `passing`: once
    only, so that it takes no room in the first-level cache."""

    first: ir.Value
    second: ir.Value
    stride: int | ir.Value
    step: int | ir.Value
    passing: bool = False


def accumulate_tiles(
    builder,
    instruction: str,
    rows: Source,
    panel: Source,
    steps: ir.Value,
    within: Callable[[], None],
    *,
    lower: bool = True,
) -> None:
    """Add the products of `steps` steps to registers 0 to 3; without `lower` rows, to 0 and 1. `within` builds what is
    computed beside those of a step; `builder` ends after the loop."""
    void = ir.VoidType()
    product = declare(builder, f"llvm.x86.{instruction}", void, _I8, _I8, _I8)
    entry, loop, done = builder.block, builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(ir.Constant(I64, 0), entry)
    for second in (False, True):
        for number, source in ((6, panel), (4, rows)) if lower or not second else ((6, panel),):
            offset = builder.mul(step, _number(source.step))
            address = after(builder, source.second if second else source.first, offset)
            load_tile(builder, number + second, address, source.stride, passing=source.passing)
    for number, (of_rows, of_columns) in enumerate([(4, 6), (4, 7), (5, 6), (5, 7)][: 4 if lower else 2]):
        builder.call(product, [_register(number), _register(of_rows), _register(of_columns)])
    within()
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
    builder.position_at_end(done)


def zero_tile(builder, number: int) -> None:
    builder.call(declare(builder, "llvm.x86.tilezero", ir.VoidType(), _I8), [_register(number)])


def load_tile(builder, number: int, address, stride, *, passing: bool = False) -> None:
    _move(builder, "tileloaddt164" if passing else "tileloadd64", number, address, stride)


def store_tile(builder, number: int, address, stride) -> None:
    _move(builder, "tilestored64", number, address, stride)


def _move(builder, name, number, address, stride):
    function = declare(builder, f"llvm.x86.{name}", ir.VoidType(), _I8, _POINTER, I64)
    builder.call(function, [_register(number), builder.inttoptr(address, _POINTER), _number(stride)])


def _number(value: int | ir.Value) -> ir.Value:
    return ir.Constant(I64, value) if isinstance(value, int) else value


def _register(number: int) -> ir.Constant:
    return ir.Constant(_I8, number)


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
    height = ir.Constant(I64, REGISTER_ROWS)
    lower = builder.add(out, builder.mul(out_stride, height))
    sums = [(0, out), (1, after(builder, out, 64)), (2, lower), (3, after(builder, lower, 64))]
    for number, address in sums:
        if begins_with_zero:
            zero_tile(builder, number)
        else:
            load_tile(builder, number, address, out_stride)
    rows = Source(x, builder.add(x, builder.mul(x_stride, height)), x_stride, _ROW_BYTES)
    columns = Source(panel, after(builder, panel, 64), PANEL_STRIDE, REGISTER_ROWS * PANEL_STRIDE)
    accumulate_tiles(builder, "tdpbf16ps", rows, columns, builder.udiv(pairs, height), lambda: None)
    for number, address in sums:
        store_tile(builder, number, address, out_stride)


# out[TILE_ROWS, 32] = x · panel, and out += x · panel; fp32; `pairs` a multiple of 16; addresses, strides in bytes
multiply_tiles, multiply_tiles_onto = _product(True), _product(False)
