"""Kernels by the code of their job (engine/ops/cpu/jobs.py).

Each is compiled when a team first runs it, for the type behind the addresses and, where it reads heads, for their width:
a process compiles what it uses, and what does not depend on the width once for all widths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from engine.ops.cpu import adapters, jobs, kernels
from engine.ops.cpu.attention import prompts, wide_prompts
from engine.ops.cpu.codegen.elements import CODES
from engine.ops.cpu.codegen.llvm import as_f32, cached_function, integers
from engine.ops.cpu.jobs import DONE, OF_HEADS
from engine.ops.cpu.products import bf16, in_rows, int8, int8_rows, nibble_tiles, nibbles, tiles, wide


@njit(inline="always")
def _number(bits):
    return as_f32(np.uint32(bits))


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
        jobs.ADD_NORM: add_norm, jobs.GATE: gate, jobs.GATE_GELU: gate_gelu, jobs.GATE_CLAMPED: gate_clamped,
        jobs.EMBED: embed,
    }  # fmt: skip


def _of_products(kind: int | float) -> dict[int, Callable[..., int]]:
    def multiply(job, first, last):
        a = integers(job)
        bf16.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_wide(job, first, last):
        a = integers(job)
        wide.multiply(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_in_rows(job, first, last):
        a = integers(job)
        in_rows.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], first, last)
        return DONE

    def multiply_tiles(job, first, last):
        a = integers(job)
        tiles.multiply(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], first, last)
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

    return {
        jobs.MULTIPLY: multiply, jobs.QUANTIZE: quantize, jobs.MULTIPLY_INT8: multiply_int8,
        jobs.MULTIPLY_TILES: multiply_tiles, jobs.MULTIPLY_WIDE: multiply_wide,
        jobs.MULTIPLY_IN_ROWS: multiply_in_rows,
    }  # fmt: skip


def _of_nibbles() -> dict[int, Callable[..., int]]:
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

    return {
        jobs.SUM_GROUPS: sum_groups, jobs.MULTIPLY_NIBBLES: multiply_nibbles,
        jobs.MULTIPLY_NIBBLE_TILES: multiply_nibble_tiles,
    }  # fmt: skip


def _of_adapters(kind: int | float) -> dict[int, Callable[..., int]]:
    def adapt_down(job, first, last):
        a = integers(job)
        adapters.down(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], first, last)
        return DONE

    def adapt_up(job, first, last):
        a = integers(job)
        adapters.up(kind, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], first, last)
        return DONE

    return {jobs.ADAPT_DOWN: adapt_down, jobs.ADAPT_UP: adapt_up}


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
        jobs.HEADS: heads, jobs.ATTEND: attend, jobs.PACK_HEADS: pack_heads,
        jobs.ATTEND_PROMPT: attend_prompt, jobs.HEADS_INT8: heads_int8, jobs.ATTEND_INT8: attend_int8,
        jobs.GATHER_INT8: gather_int8,
        jobs.ATTEND_PROMPT_WIDE: attend_prompt_wide, jobs.ATTEND_PROMPT_WIDE_INT8: attend_prompt_wide_int8,
    }  # fmt: skip


def kernel(code: int, kind: int | float, dim8: tuple[int, ...]) -> int:
    """Address of a job's kernel, compiled or loaded now if it was not yet. It stays valid in this process."""
    compiled_now = _kernel(code, kind, dim8 if code in OF_HEADS else ())
    return int(compiled_now.address)


@functools.lru_cache(None, typed=True)  # 0 and 0.0 are two kinds
def _kernel(code: int, kind: int | float, dim8: tuple[int, ...]) -> Any:
    of_rows = _of_rows(kind) | _of_products(kind) | _of_nibbles() | _of_adapters(kind)
    makers = _of_heads(kind, dim8) if code in OF_HEADS else of_rows
    return cached_function(makers[code], types.int64(types.int64, types.int64, types.int64), (kind, dim8))
