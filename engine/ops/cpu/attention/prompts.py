"""Attention over a prompt in bf16. Scores and weights stay in the first two caches.

    keys ──panels of 32 tokens──►  rows × panel ─► scores, fp32 ─► softmax ─► weights, bf16
    values ─panels of 32 columns────────────────────────────────►  rows × panel ─► sums, fp32 ─► out

A tile is 12 queries (32 with AMX) of up to two heads that share a KV head. It takes the keys in blocks of 256, which lie
at multiples of 256 whatever the tile. The softmax's base is the largest score so far: where it grows, the sums of earlier
blocks are multiplied by 2^(old − new) (algorithm: Milakov and Gimelshein, Online normalizer calculation for softmax,
2018). Panels that no query of the tile sees are not computed.

Sums and scores are fp32. The weights are rounded to bf16 before normalisation; the result is divided by their sum.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.ops.cpu.attention.softmax import HIDDEN, LOWEST, bases, divide, fade_row, most_by_32, powers
from engine.ops.cpu.codegen.llvm import after, compiled, floats, keep, load, row_addresses, words
from engine.ops.cpu.codegen.tile_registers import (
    REGISTER_ROWS,
    TILE_ROWS,
    begin_tiles,
    end_tiles,
    multiply_tiles,
    multiply_tiles_onto,
)
from engine.ops.cpu.products.bf16 import MAX_ROWS, PANEL, SUMS, accumulate, has_instruction

ROWS = MAX_ROWS  # of a tile without AMX
BLOCK = 256  # keys: scores and weights of 12 rows are 18 KiB
HEADS = 2  # of a tile at most
_LOG2E = np.float32(1.44269504088896341)
_LINE = 64
_STATE = TILE_ROWS * (3 * 4 + _LINE)  # bytes of one head's state in a tile, see _softmax


@intrinsic
def _scores(typing, q, q_stride, panel, pairs, out, out_stride):
    """out[ROWS, 32] = q · panel, fp32; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        q, q_stride, panel, pairs, out, out_stride = args
        zero = ir.Constant(SUMS, [0.0] * 16)
        for own in accumulate(builder, ROWS, q, q_stride, panel, pairs, [(zero, zero)] * ROWS):
            for half in (0, 1):
                to = builder.inttoptr(after(builder, out, 64 * half), SUMS.as_pointer())
                builder.store(own[half], to, align=4)
            out = builder.add(out, out_stride)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


@intrinsic
def _mix(typing, weights, stride, panel, pairs, sums, sums_stride):
    """sums[ROWS, 32] += weights · panel, fp32; addresses, strides in bytes."""

    def codegen(context, builder, signature, args):
        if not has_instruction():
            return context.get_dummy_value()
        weights, stride, panel, pairs, sums, sums_stride = args
        places = row_addresses(builder, sums, sums_stride, ROWS)
        starts = [[load(builder, SUMS, after(builder, at, 64 * half), 4) for half in (0, 1)] for at in places]
        found = accumulate(builder, ROWS, weights, stride, panel, pairs, starts)
        for at, own in zip(places, found, strict=True):
            for half in (0, 1):
                to = builder.inttoptr(after(builder, at, 64 * half), SUMS.as_pointer())
                builder.store(own[half], to, align=4)
        return context.get_dummy_value()

    return types.void(*([types.int64] * 6)), codegen


def padded(tokens: int) -> int:
    """`tokens` rounded up to whole panels."""
    return -(-tokens // PANEL) * PANEL


@compiled
def pack_head(keys, values, head_stride, token_stride, tokens, dim8, panels, first, last):
    """Pack the KV heads [first, last) into panels, one head after the other, keys before values. Strides in bytes. The
    last panel is padded with zeros: hidden tokens have weight 0, and 0 · 0 is 0."""
    pairs, whole = 4 * len(dim8), (tokens + PANEL - 1) // PANEL * PANEL
    for head in range(first, last):
        source = words(keys + head * head_stride)
        to = words(panels + head * whole * pairs * 8)
        step = token_stride // 4
        for token in range(whole):
            base = token // PANEL * PANEL * pairs + token % PANEL
            if token < tokens:
                for pair in range(pairs):
                    to[base + pair * PANEL] = source[token * step + pair]
            else:
                for pair in range(pairs):
                    to[base + pair * PANEL] = np.uint32(0)
        source = words(values + head * head_stride)
        to = words(panels + head * whole * pairs * 8 + whole * pairs * 4)
        for two in range(whole // 2):
            at = 2 * two * step
            for pair in range(pairs):
                even = source[at + pair] if 2 * two < tokens else np.uint32(0)
                odd = source[at + step + pair] if 2 * two + 1 < tokens else np.uint32(0)
                base = (pair // 16 * (whole // 2) + two) * PANEL + pair % 16 * 2
                to[base] = (even & np.uint32(0xFFFF)) | (odd << np.uint32(16))
                to[base + 1] = (even >> np.uint32(16)) | (odd & np.uint32(0xFFFF0000))


@njit(inline="always")
def _hide(scores, width, begin, end):
    """Keys outside [begin, end) of one row."""
    row = floats(scores)
    for i in range(min(begin, width)):
        row[i] = HIDDEN
    for i in range(max(end, 0), width):
        row[i] = HIDDEN


@njit(inline="always")
def _softmax(scores, width, height, weights, scale, state, mixed, dim):
    """Weights of a block's scores, BLOCK apart, with the largest scores so far as bases. `state`: bases of all rows, the
    largest scores of this block, fades, sums of weights."""
    chunks = width // PANEL
    tops, most_of_rows, fades, sums = (
        state,
        state + 4 * TILE_ROWS,
        state + 8 * TILE_ROWS,
        state + 12 * TILE_ROWS,
    )
    largest, base, fade = floats(most_of_rows), floats(tops), floats(fades)
    for i in range(height):
        largest[i] = most_by_32(scores + i * BLOCK * 4, chunks)
    if bases(most_of_rows, (height + 15) // 16, scale, tops, fades):
        for i in range(height):
            fade_row(mixed + i * dim * 4, dim // PANEL, fade[i])
    for i in range(height):
        powers(
            scores + i * BLOCK * 4, chunks, scale, base[i], weights + i * BLOCK * 2, fade[i], sums + i * _LINE
        )


@njit(inline="always")
def _begin(q, q_stride, height, dim, queries, mixed, state, sink):
    """Copy the queries of one head: rows of q may be 4 KiB apart, which is one set of the first-level cache. `sink`, if
    it is above LOWEST, is the first maximum of each row, and 1 its first sum: a sink has a weight and no value."""
    for i in range(height):
        source, to = words(q + i * q_stride), words(queries + i * dim * 2)
        for pair in range(dim // 2):
            to[pair] = source[pair]
    sums = floats(mixed)
    for i in range(height * dim):
        sums[i] = np.float32(0.0)
    tops, sums = floats(state), floats(state + 12 * TILE_ROWS)
    base, weight = max(sink, LOWEST), np.float32(1.0) if sink > LOWEST else np.float32(0.0)
    for i in range(TILE_ROWS):
        tops[i] = base
    for i in range(height * 16):
        sums[i] = np.float32(0.0)
    for i in range(height):
        sums[i * 16] = weight


@njit(inline="always")
def _attend_block(
    here, height, dim, at, window, keys, values, whole, start, width, cut, factor, scores, weights, state, sums, amx
):  # fmt: skip
    """Add the values of `width` keys from `start` on, weighted, to `sums` of a tile of queries from position `at` on.
    `cut`: some of the keys are hidden from some of the queries."""
    for key in range(0, width, PANEL):
        panel = keys + (start + key) * dim * 2
        if amx:
            multiply_tiles(here, dim * 2, panel, dim // 2, scores + key * 4, BLOCK * 4)
        else:
            _scores(here, dim * 2, panel, dim // 2, scores + key * 4, BLOCK * 4)
    if cut:
        for i in range(height):
            own = at + i + 1 - start
            _hide(scores + i * BLOCK * 4, width, own - window if window else 0, own)
    _softmax(scores, width, height, weights, factor, state, sums, dim)
    for column in range(0, dim, PANEL):
        panel, to = values + (column // PANEL * whole + start) * 64, sums + column * 4
        if amx:
            multiply_tiles_onto(weights, BLOCK * 2, panel, width // 2, to, dim * 4)
        else:
            _mix(weights, BLOCK * 2, panel, width // 2, to, dim * 4)


@compiled
def attend_prompt(
    q, q_stride, out, out_stride, rows, begin, tokens, dim8, group, window, scale, panels, amx, sinks, first, last
):  # fmt: skip
    """The heads [first, last): `rows` queries each, at least a tile's, the first at position `begin`, of `tokens` keys in
    `panels`; with AMX or without. `sinks`: the address of the heads' attention sinks, float32 [heads]; 0: the
    model has none.

    q and out are [row, head, dim] with strides in bytes between rows.
    """
    dim = 8 * len(dim8)
    whole = (tokens + PANEL - 1) // PANEL * PANEL
    height = TILE_ROWS if amx else ROWS
    factor, logits = np.float32(scale) * _LOG2E, floats(sinks)
    scratch = np.zeros(TILE_ROWS * (6 * BLOCK + HEADS * (6 * dim + 12 + _LINE)) + _LINE, np.uint8)
    scores = (np.int64(scratch.ctypes.data) + _LINE - 1) // _LINE * _LINE
    weights = scores + TILE_ROWS * BLOCK * 4
    mixed = weights + TILE_ROWS * BLOCK * 2
    queries = mixed + HEADS * TILE_ROWS * dim * 4
    states = queries + HEADS * TILE_ROWS * dim * 2
    if amx:
        begin_tiles(REGISTER_ROWS, REGISTER_ROWS)
    head = first
    while head < last:
        together = min(HEADS, last - head, group - head % group)
        keys = panels + head // group * whole * dim * 4
        values = keys + whole * dim * 2
        for tile in range((rows + height - 1) // height):
            row = min(tile * height, rows - height)  # the last tile computes some rows again
            at = begin + row
            for h in range(together):
                sink = logits[head + h] * _LOG2E if sinks else LOWEST
                _begin(
                    q + row * q_stride + (head + h) * dim * 2, q_stride, height, dim,
                    queries + h * TILE_ROWS * dim * 2, mixed + h * TILE_ROWS * dim * 4, states + h * _STATE, sink,
                )  # fmt: skip
            low = max(0, at + 1 - window) // PANEL * PANEL if window else 0
            high = (at + height + PANEL - 1) // PANEL * PANEL
            for block in range(low // BLOCK * BLOCK, high, BLOCK):
                start, stop = max(block, low), min(block + BLOCK, high)
                width = stop - start
                cut = stop > at + 1 or (window and start < at + height - window)
                for h in range(together):
                    _attend_block(
                        queries + h * TILE_ROWS * dim * 2, height, dim, at, window, keys, values, whole, start, width, cut,
                        factor, scores, weights, states + h * _STATE, mixed + h * TILE_ROWS * dim * 4, amx,
                    )  # fmt: skip
            for h in range(together):
                for i in range(height):
                    divide(
                        mixed + (h * TILE_ROWS + i) * dim * 4, dim // PANEL,
                        states + h * _STATE + 12 * TILE_ROWS + i * _LINE,
                        out + (row + i) * out_stride + (head + h) * dim * 2,
                    )  # fmt: skip
        head += together
    if amx:
        end_tiles()
    keep(scratch)
