"""Kernels as jobs that threads share without a word to each other.

A job is written into a row of int64, then its tickets are put out; whoever reads a ticket does that share. The thread
that leads does shares too and waits only for those that another has begun: a helper that sleeps, or whose core serves
another process, delays nobody. Helpers look for tickets without the interpreter's lock and give up after a while
without any. Two OpenMP threads that sleep between operations need about 60 µs to meet (measured), a decode step has a
hundred operations; here it is one or two.
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

from engine.ops import cpu_kernels as kernels
from engine.ops import cpu_products as products
from engine.ops import cpu_prompts as prompts

# int64 numbers of a job. What several threads write lies in cache lines of its own.
TICKETS, FINISHED, STOP, CODE = 0, 8, 16, 24  # TICKETS: shares · 2³² + next share
TOTAL, SHARES, ARGUMENTS = CODE + 1, CODE + 2, CODE + 3
SIZE = 64
ADD_NORM, GATE, HEADS, ATTEND, MULTIPLY, PACK_HEADS, ATTEND_PROMPT = range(7)
_LOW = 0xFFFFFFFF


def _address(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.inttoptr(value, ir.IntType(64).as_pointer())


@intrinsic
def _add(typing, address, value):
    """Atomic; returns what was there before."""

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
    """Tells the core that it only waits."""

    def codegen(context, builder, signature, args):
        name = "llvm.x86.sse2.pause"
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@njit(inline="always")
def _number(bits):
    return kernels.as_f32(np.uint32(bits))


@njit
def _share(kind, dim8, job, first, last):
    """Items [first, last) of the job."""
    code = kernels.integers(job)[CODE]
    a = kernels.integers(job + ARGUMENTS * 8)
    if code == MULTIPLY:
        products.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
    elif code == ADD_NORM:
        kernels.add_norm(kind, a[0], a[1], a[2], a[3], first, last, a[4], _number(a[5]))
    elif code == GATE:
        kernels.silu_mul(kind, a[0], a[1], first, last, a[2])
    elif code == HEADS:
        kernels.rotate_and_keep(
            kind, a[0], first, last, a[1], a[2], dim8, a[3], a[4], a[5], a[6],
            a[7], a[8], a[9], a[10], a[11], a[12], _number(a[13]),
        )  # fmt: skip
    elif code == PACK_HEADS:
        prompts.pack_head(a[0], a[1], a[2], a[3], a[4], dim8, a[5], first, last)
    elif code == ATTEND_PROMPT:
        prompts.attend_prompt(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], dim8, a[7], a[8], _number(a[9]), a[10], first, last
        )
    else:
        kernels.attend_tokens(
            kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last,
            a[7], a[8], a[9], a[10], a[11], a[12], dim8, a[13], _number(a[14]),
        )  # fmt: skip


def _make(sources: str) -> Any:
    """`sources` is part of the name under which numba keeps the machine code: by itself it sees changes of this file
    only, not of those whose kernels are compiled into it."""

    def take(kind, dim8, job, patience):
        """Patience 0 leads: puts the tickets out, returns when all shares are done. More serves: does shares until
        it has looked that often in a row for nothing, or STOP is set."""
        numbers = kernels.integers(job)
        led = numbers[SHARES]
        done = looks = len(sources) * 0
        if patience == 0:
            numbers[FINISHED] = 0
            _write(job + TICKETS * 8, led << 32)
        while True:
            seen = _read(job + TICKETS * 8)
            if (seen & _LOW) < (seen >> 32):
                ticket = _add(job + TICKETS * 8, 1)
                number, shares = ticket & _LOW, ticket >> 32
                if number < shares:
                    total = numbers[TOTAL]
                    _share(kind, dim8, job, total * number // shares, total * (number + 1) // shares)
                    done += 1
                    looks = 0
                    if patience:
                        _add(job + FINISHED * 8, 1)
                    continue
            if patience == 0:
                break
            looks += 1
            if looks > patience or _read(job + STOP * 8):
                return
            _pause()
        while _read(job + FINISHED * 8) + done < led:
            _pause()

    return kernels.compiled(take)


def _sources() -> str:
    here = Path(__file__)
    names = ("cpu_kernels.py", "cpu_products.py", "cpu_prompts.py")
    files = [here, *(here.with_name(name) for name in names)]
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


take = _make(_sources())
