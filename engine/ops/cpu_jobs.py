"""Kernels as jobs whose shares are computed by several threads.

The leading thread writes a job into the team's int64 numbers, then the number of its shares. Each thread takes the next
share by an atomic add. The leader computes shares too, and waits only for those that a helper has begun, so a helper that
sleeps or has lost its core delays no job. Helpers poll without the interpreter's lock and return after a while without a
share. This costs 1 to 2 µs a job; two OpenMP threads that sleep between operations need about 60 µs (measured). A list of
jobs is led by one call: a decode step has about 145.
"""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops import cpu_int8 as int8
from engine.ops import cpu_kernels as kernels
from engine.ops import cpu_products as products
from engine.ops import cpu_prompts as prompts
from engine.ops.cpu_llvm import as_f32, compiled, integers, prefetch_line

# Indices of the team's int64 numbers. Those that several threads write are in separate cache lines.
NEXT, FINISHED, STOP, LISTED, LEFT, CODE = 0, 8, 16, 17, 18, 24  # NEXT: shares · 2³² + next share
TOTAL, SHARES, AHEAD, ARGUMENTS = CODE + 1, CODE + 2, CODE + 3, CODE + 4
SIZE = 64
JOB = SIZE - CODE  # numbers of one job: code, total, shares, what to prefetch, arguments
WEIGHTS = 3  # of a product's arguments
AHEAD_BYTES = (
    16 << 10
)  # of the next product's weights, prefetched by each job before it: half of a first-level cache
ADD_NORM, GATE, HEADS, ATTEND, MULTIPLY, PACK_HEADS, ATTEND_PROMPT, EMBED, QUANTIZE, MULTIPLY_INT8 = range(10)
PRODUCTS = (MULTIPLY, MULTIPLY_INT8)
_LOW = 0xFFFFFFFF


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


@njit
def _prefetch_ahead(job, last):
    """By the job's last share: weights of the next product, so that memory is read while small jobs are computed."""
    numbers = integers(job)
    address = numbers[AHEAD]
    if address and last == numbers[TOTAL]:
        for line in range(0, AHEAD_BYTES, 64):
            prefetch_line(address + line)


@njit
def _share(kind, dim8, job, first, last):
    """Items [first, last) of the job."""
    code = integers(job)[CODE]
    a = integers(job + ARGUMENTS * 8)
    if code not in PRODUCTS:  # a product reads its own weights first
        _prefetch_ahead(job, last)
    if code == MULTIPLY:
        products.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        _prefetch_ahead(job, last)
    elif code == MULTIPLY_INT8:
        int8.multiply(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], first, last)
        _prefetch_ahead(job, last)
    elif code == QUANTIZE:
        int8.quantize(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
    elif code == ADD_NORM:
        kernels.add_norm(kind, a[0], a[1], a[2], a[3], first, last, a[4], _number(a[5]))
    elif code == GATE:
        kernels.silu_mul(kind, a[0], a[1], first, last, a[2])
    elif code == HEADS:
        kernels.rotate_and_store(
            kind, a[0], first, last, a[1], a[2], dim8, a[3], a[4], a[5], a[6],
            a[7], a[8], a[9], a[10], a[11], a[12], _number(a[13]),
        )  # fmt: skip
    elif code == EMBED:
        kernels.copy_rows(kind, a[0], a[1], a[2], a[3], first, last)
    elif code == PACK_HEADS:
        prompts.pack_head(a[0], a[1], a[2], a[3], a[4], dim8, a[5], first, last)
    elif code == ATTEND_PROMPT:
        prompts.attend_prompt(
            a[0],
            a[1],
            a[2],
            a[3],
            a[4],
            a[5],
            a[6],
            dim8,
            a[7],
            a[8],
            _number(a[9]),
            a[10],
            a[11],
            first,
            last,
        )
    else:
        kernels.attend_tokens(
            kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], first, last,
            a[9], a[10], a[11], a[12], a[13], a[14], dim8, a[15], _number(a[16]),
        )  # fmt: skip


@njit
def _lead(kind, dim8, team):
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
        _share(kind, dim8, team, total * number // led, total * (number + 1) // led)
        done += 1
    while _read(team + FINISHED * 8) + done < led:
        _pause()


@njit
def _help(kind, dim8, team, polls):
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
                _share(kind, dim8, team, total * number // shares, total * (number + 1) // shares)
                idle = 0
                _add(team + FINISHED * 8, 1)
                continue
        idle += 1
        stop = _read(team + STOP * 8)
        if stop or (idle > polls and not _read(team + LISTED * 8)):
            _add(team + LEFT * 8, 1)
            if stop or not _read(team + LISTED * 8):
                return
            _add(
                team + LEFT * 8, -1
            )  # a list has begun meanwhile, whose leader may have counted on this helper
        _pause()


def _make(sources: str) -> Any:
    """`sources` becomes part of the key of numba's cache: by itself numba detects changes of this file only, not of the
    files whose kernels are compiled into it."""

    def work(kind, dim8, team, polls, jobs, count):
        """With `polls`, help. Otherwise lead: the team's job, or `count` ≥ 1 jobs at address `jobs`, each after the one
        before it is done."""
        numbers = integers(team)
        if polls > len(sources) * 0:
            _help(kind, dim8, team, polls)
            return
        if count == 0:
            _lead(kind, dim8, team)
            return
        for number in range(count):
            job = jobs + number * JOB * 8
            own = integers(job)
            if own[SHARES - CODE] == 1:  # no other thread has to see it
                # not a literal 0: for that, numba would compile a second copy of all kernels, and LLVM might order
                # the sums of the two differently
                _share(kind, dim8, job - CODE * 8, np.int64(0), own[TOTAL - CODE])
                continue
            for i in range(JOB):
                numbers[CODE + i] = own[i]
            _lead(kind, dim8, team)
        _write(team + LISTED * 8, 0)

    return compiled(work)


def _sources() -> str:
    here = Path(__file__)
    names = ("int8", "kernels", "llvm", "products", "prompts", "softmax", "tiles")
    files = [here, *(here.with_name(f"cpu_{name}.py") for name in names)]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


work = _make(_sources())
