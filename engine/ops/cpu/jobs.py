"""Kernels as jobs whose shares are computed by several threads.

The leading thread writes a job into the team's int64 numbers, then the number of its shares. Each thread takes the next
share by an atomic add. The leader computes shares too, and waits only for those that a helper has begun, so a helper that
sleeps or has lost its core delays no job. Helpers poll without the interpreter's lock and return after a while without a
share. This costs 1 to 2 µs per job; two OpenMP threads that sleep between operations need about 60 µs (measured). A list
of jobs is led by one call: a decode step has about 145.
"""

from __future__ import annotations

import platform

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops.cpu.codegen.llvm import cached, integers, prefetch_line

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
