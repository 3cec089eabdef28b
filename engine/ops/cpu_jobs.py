"""Kernels as jobs whose shares are computed by several threads.

The leading thread writes a job into the team's int64 numbers, then the number of its shares. Each thread takes the next
share by an atomic add. The leader computes shares too, and waits only for those that a helper has begun, so a helper that
sleeps or has lost its core delays no job. Helpers poll without the interpreter's lock and return after a while without a
share. This costs 1 to 2 µs a job; two OpenMP threads that sleep between operations need about 60 µs (measured). A list of
jobs is led by one call: a decode step has about 145.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops import cpu_adapters as adapters
from engine.ops import cpu_int8 as int8
from engine.ops import cpu_int8_rows as int8_rows
from engine.ops import cpu_kernels as kernels
from engine.ops import cpu_nibble_tiles as nibble_tiles
from engine.ops import cpu_nibbles as nibbles
from engine.ops import cpu_products as products
from engine.ops import cpu_prompts as prompts
from engine.ops import cpu_row_products as row_products
from engine.ops import cpu_tile_products as tile_products
from engine.ops import cpu_wide_products as wide_products
from engine.ops import cpu_wide_prompts as wide_prompts
from engine.ops.cpu_elements import CODES
from engine.ops.cpu_llvm import as_f32, cached, cached_function, integers, prefetch_line

# Indices of the team's int64 numbers. Those that several threads write are in separate cache lines.
# NEXT: shares · 2³² + next share.
NEXT, FINISHED, STOP, LISTED, LEFT, FAILED, KERNEL = 0, 8, 16, 17, 18, 19, 24
TOTAL, SHARES, AHEAD, READS, ARGUMENTS = range(KERNEL + 1, KERNEL + 6)  # READS: the job is a product
SIZE = 64
# Numbers of one job: its kernel's address, total, shares, where to prefetch from, whether it is a product, arguments.
JOB = SIZE - KERNEL
X, ROWS, _, WEIGHTS, _, OUT = range(6)  # indices among a product's arguments
# Of the next product's weights, prefetched by each job before it: half of a first-level cache.
AHEAD_BYTES = 16 << 10
(
    ADD_NORM, GATE, HEADS, ATTEND, MULTIPLY, PACK_HEADS, ATTEND_PROMPT, EMBED, QUANTIZE, MULTIPLY_INT8, GATE_GELU,
    GATE_CLAMPED, MULTIPLY_TILES, HEADS_INT8, ATTEND_INT8, GATHER_INT8, ADAPT_DOWN, ADAPT_UP, MULTIPLY_WIDE,
    MULTIPLY_IN_ROWS, ATTEND_PROMPT_WIDE, ATTEND_PROMPT_WIDE_INT8, SUM_GROUPS, MULTIPLY_NIBBLES, MULTIPLY_NIBBLE_TILES,
) = range(25)  # fmt: skip
PRODUCTS = (
    MULTIPLY, MULTIPLY_INT8, MULTIPLY_TILES, MULTIPLY_WIDE, MULTIPLY_IN_ROWS, MULTIPLY_NIBBLES, MULTIPLY_NIBBLE_TILES,
)  # fmt: skip
OF_HEADS = (
    HEADS, ATTEND, PACK_HEADS, ATTEND_PROMPT, HEADS_INT8, ATTEND_INT8, GATHER_INT8,
    ATTEND_PROMPT_WIDE, ATTEND_PROMPT_WIDE_INT8,
)  # fmt: skip
_LOW = 0xFFFFFFFF
DONE = 1  # returned by a kernel; numba's callbacks that raise write the error to stderr and return 0


def _address(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.inttoptr(value, ir.IntType(64).as_pointer())


@intrinsic
def _add(typing, address, value):
    """Atomic; returns the value before."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", _address(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _read(typing, address):
    def codegen(context, builder, signature, args):
        return builder.load_atomic(_address(builder, args[0]), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _write(typing, address, value):
    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _address(builder, args[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _pause(typing):
    """The processor's hint for a loop that only waits."""

    def codegen(context, builder, signature, args):
        name = "llvm.x86.sse2.pause"
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(inline="always")
def _number(bits):
    return as_f32(np.uint32(bits))


@intrinsic
def _call(typing, function, arguments, first, last):
    """DONE from the kernel at address `function`, on items [first, last); 0 if it raised."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 3)
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


@njit
def _share(team, job, first, last):
    """Items [first, last) of the job. Its last share prefetches weights of the next product, so that memory is read while
    small jobs are computed; a product reads its own weights first. FAILED of the team is set if the kernel raises."""
    numbers = integers(job)
    function, address, done = numbers[KERNEL], numbers[AHEAD], DONE
    if numbers[READS]:
        done = _call(function, job + ARGUMENTS * 8, first, last)
    if address and last == numbers[TOTAL]:
        for line in range(0, AHEAD_BYTES, 64):
            prefetch_line(address + line)
    if not numbers[READS]:
        done = _call(function, job + ARGUMENTS * 8, first, last)
    if done != DONE:
        _write(team + FAILED * 8, 1)


@njit
def _lead(team):
    """Offer the shares of the team's job; return when all are done."""
    numbers = integers(team)
    led, total = numbers[SHARES], numbers[TOTAL]
    done = 0
    numbers[FINISHED] = 0
    _write(team + NEXT * 8, led << 32)
    while True:
        number = _add(team + NEXT * 8, 1) & _LOW
        if number >= led:
            break
        _share(team, team, total * number // led, total * (number + 1) // led)
        done += 1
    while _read(team + FINISHED * 8) + done < led:
        _pause()


@njit
def _help(team, polls):
    """Compute shares until `polls` polls in a row found none while no list is computed, or STOP is set. LEFT counts the
    helpers that have returned: the leader looks there, because a helper that waits for the interpreter's lock to
    return would be thought to help, and a whole list be computed without it."""
    numbers = integers(team)
    idle = 0
    while True:
        seen = _read(team + NEXT * 8)
        if (seen & _LOW) < (seen >> 32):
            taken = _add(team + NEXT * 8, 1)
            number, shares = taken & _LOW, taken >> 32
            if number < shares:
                total = numbers[TOTAL]
                _share(team, team, total * number // shares, total * (number + 1) // shares)
                idle = 0
                _add(team + FINISHED * 8, 1)
                continue
        idle += 1
        stop = _read(team + STOP * 8)
        if stop or (idle > polls and not _read(team + LISTED * 8)):
            _add(team + LEFT * 8, 1)
            if stop or not _read(team + LISTED * 8):
                return
            # A list has begun meanwhile, and its leader may have counted this helper.
            _add(team + LEFT * 8, -1)
        _pause()


@cached
def work(team, polls, jobs, count):
    """With `polls`, help. Otherwise lead: the team's job, or `count` ≥ 1 jobs at address `jobs`, each after the one
    before it is done."""
    numbers = integers(team)
    if polls:
        _help(team, polls)
        return
    if count == 0:
        _lead(team)
        return
    for number in range(count):
        job = jobs + number * JOB * 8
        own = integers(job)
        if own[SHARES - KERNEL] == 1:  # no other thread has to see it
            _share(team, job - KERNEL * 8, np.int64(0), own[TOTAL - KERNEL])
            continue
        for i in range(JOB):
            numbers[KERNEL + i] = own[i]
        _lead(team)
    _write(team + LISTED * 8, 0)


# --- kernels by their job's code -------------------------------------------------------------------------
#
# Each is compiled when a team first runs it, for the type behind the addresses and, where it reads heads, for their width:
# a process compiles what it uses, and what does not depend on the width once for all widths.


def _of_rows(kind: int | float) -> dict[int, Callable[..., int]]:
    def add_norm(job, first, last):
        a = integers(job)
        kernels.add_norm(kind, a[0], a[1], a[2], a[3], first, last, a[4], _number(a[5]), a[6])
        return DONE

    def gate(job, first, last):
        a = integers(job)
        kernels.silu_mul(kind, a[0], a[1], first, last, a[2])
        return DONE

    def gate_gelu(job, first, last):
        a = integers(job)
        kernels.gelu_mul(kind, a[0], a[1], first, last, a[2])
        return DONE

    def gate_clamped(job, first, last):
        a = integers(job)
        kernels.clamped_swiglu(kind, a[0], a[1], first, last, a[2], _number(a[3]), _number(a[4]))
        return DONE

    def embed(job, first, last):
        a = integers(job)
        kernels.embed_rows(kind, a[0], a[1], a[2], a[3], first, last, _number(a[4]))
        return DONE

    return {
        ADD_NORM: add_norm, GATE: gate, GATE_GELU: gate_gelu, GATE_CLAMPED: gate_clamped, EMBED: embed,
    }  # fmt: skip


def _of_products(kind: int | float) -> dict[int, Callable[..., int]]:
    def multiply(job, first, last):
        a = integers(job)
        products.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_wide(job, first, last):
        a = integers(job)
        wide_products.multiply(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_in_rows(job, first, last):
        a = integers(job)
        row_products.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_tiles(job, first, last):
        a = integers(job)
        tile_products.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], first, last)
        return DONE

    def sum_groups(job, first, last):
        a = integers(job)
        nibbles.sum_groups(a[0], a[1], a[2], a[3], first, last)
        return DONE

    def multiply_nibbles(job, first, last):
        a = integers(job)
        nibbles.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], first, last)
        return DONE

    def multiply_nibble_tiles(job, first, last):
        a = integers(job)
        nibble_tiles.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], first, last)
        return DONE

    def quantize(job, first, last):
        a = integers(job)
        int8_rows.quantize(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_int8(job, first, last):
        a = integers(job)
        int8.multiply(
            kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], first, last
        )  # fmt: skip
        return DONE

    def adapt_down(job, first, last):
        a = integers(job)
        adapters.down(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], first, last)
        return DONE

    def adapt_up(job, first, last):
        a = integers(job)
        adapters.up(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], first, last)
        return DONE

    return {
        MULTIPLY: multiply, QUANTIZE: quantize, MULTIPLY_INT8: multiply_int8, MULTIPLY_TILES: multiply_tiles,
        MULTIPLY_WIDE: multiply_wide, MULTIPLY_IN_ROWS: multiply_in_rows, ADAPT_DOWN: adapt_down, ADAPT_UP: adapt_up,
        SUM_GROUPS: sum_groups, MULTIPLY_NIBBLES: multiply_nibbles,
        MULTIPLY_NIBBLE_TILES: multiply_nibble_tiles,
    }  # fmt: skip


@njit(inline="always")
def _store_heads(kind, stored, dim8, job, first, last):
    a = integers(job)
    kernels.rotate_and_store(
        kind, stored, a[0], first, last, a[1], a[2], dim8, a[3], a[4], a[5], a[6],
        a[7], a[8], a[9], a[10], a[11], a[12], _number(a[13]), a[14],
    )  # fmt: skip


@njit(inline="always")
def _attend(kind, stored, dim8, job, first, last):
    a = integers(job)
    kernels.attend_tokens(
        kind, stored, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], first, last,
        a[9], a[10], a[11], a[12], a[13], a[14], dim8, a[15], _number(a[16]), _number(a[17]), a[18],
    )  # fmt: skip


@njit(inline="always")
def _attend_prompt(kind, stored, dim8, job, first, last):
    a = integers(job)
    wide_prompts.attend_prompt(
        kind, stored, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], dim8,
        a[13], _number(a[14]), _number(a[15]), a[16], a[17], first, last,
    )  # fmt: skip


def _of_heads(kind: int | float, dim8: tuple[int, ...]) -> dict[int, Callable[..., int]]:
    def heads(job, first, last):
        _store_heads(kind, kind, dim8, job, first, last)
        return DONE

    def heads_int8(job, first, last):
        _store_heads(kind, CODES, dim8, job, first, last)
        return DONE

    def attend(job, first, last):
        _attend(kind, kind, dim8, job, first, last)
        return DONE

    def attend_int8(job, first, last):
        _attend(kind, CODES, dim8, job, first, last)
        return DONE

    def gather_int8(job, first, last):
        a = integers(job)
        kernels.gather_int8(kind, a[0], a[1], a[2], a[3], a[4], a[5], dim8, a[6], first, last)
        return DONE

    def pack_heads(job, first, last):
        a = integers(job)
        prompts.pack_head(a[0], a[1], a[2], a[3], a[4], dim8, a[5], first, last)
        return DONE

    def attend_prompt(job, first, last):
        a = integers(job)
        prompts.attend_prompt(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], dim8, a[7], a[8], _number(a[9]), a[10], a[11], a[12],
            first, last,
        )  # fmt: skip
        return DONE

    def attend_prompt_wide(job, first, last):
        _attend_prompt(kind, kind, dim8, job, first, last)
        return DONE

    def attend_prompt_wide_int8(job, first, last):
        _attend_prompt(kind, CODES, dim8, job, first, last)
        return DONE

    return {
        HEADS: heads, ATTEND: attend, PACK_HEADS: pack_heads, ATTEND_PROMPT: attend_prompt,
        HEADS_INT8: heads_int8, ATTEND_INT8: attend_int8, GATHER_INT8: gather_int8,
        ATTEND_PROMPT_WIDE: attend_prompt_wide, ATTEND_PROMPT_WIDE_INT8: attend_prompt_wide_int8,
    }  # fmt: skip


def kernel(code: int, kind: int | float, dim8: tuple[int, ...]) -> int:
    """Address of a job's kernel, compiled or loaded now if it was not yet. It stays valid in this process."""
    compiled_now = _kernel(code, kind, dim8 if code in OF_HEADS else ())
    return int(compiled_now.address)


@functools.lru_cache(None, typed=True)  # 0 and 0.0 are two kinds
def _kernel(code: int, kind: int | float, dim8: tuple[int, ...]) -> Any:
    makers = _of_heads(kind, dim8) if code in OF_HEADS else _of_rows(kind) | _of_products(kind)
    return cached_function(makers[code], types.int64(types.int64, types.int64, types.int64), (kind, dim8))
