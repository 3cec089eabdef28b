"""Adapters' part of the rows of a product, compiled by numba: y += x Aᵀ Bᵀ, the rows of an adapter one after the other.

A is stored as [slot, part, rank, input], B as [slot, rank, output], both bf16 or fp32. The rows of a step and their slots
come sorted by slot, so that an adapter's weights stay in the first-level cache while its rows pass; rows without an
adapter are not in that list. The order of a row's sums does not depend on the other rows. Sums are float32; what lies
between the two products is not rounded, and the sum is added to y before it is rounded.
"""

from __future__ import annotations

import numpy as np

from engine.ops.cpu.codegen.elements import F, element_size, load, ptr, store
from engine.ops.cpu.codegen.llvm import compiled, integers, keep

RANKS = 4  # that are computed together: x is read once for them
PIECE = 64  # outputs whose sums are computed together


@compiled
def down(kind, x, width, a, parts, most, ranks, rows, low, stride, first, last):
    """low[row, part · most + r] = x[row] · A[slot, part, r] for the ranks that the adapter has; the items [first, last)
    are groups of RANKS of each of `parts`.

    `rows`: how many, then row and slot (from 0 on) of each; `ranks`: int64 [slot, part]; `most`: ranks of a slot; `low`:
    float32, `stride` numbers a row.
    """
    listed, rank_of, out = integers(rows), integers(ranks), ptr(low, 0.0)
    groups, size = (most + RANKS - 1) // RANKS, element_size(kind)
    for item in range(first, last):
        part, begin = item // groups, item % groups * RANKS
        for number in range(listed[0]):
            row, slot = listed[1 + 2 * number], listed[2 + 2 * number]
            count = min(rank_of[slot * parts + part] - begin, RANKS)
            if count <= 0:
                continue
            source = ptr(x + row * width * size, kind)
            weights = ptr(a + ((slot * parts + part) * most + begin) * width * size, kind)
            at = row * stride + part * most + begin
            if count == RANKS:
                one, two, three, four = F(0.0), F(0.0), F(0.0), F(0.0)
                for i in range(width):
                    value = load(source, i)
                    one += value * load(weights, i)
                    two += value * load(weights, width + i)
                    three += value * load(weights, 2 * width + i)
                    four += value * load(weights, 3 * width + i)
                out[at], out[at + 1], out[at + 2], out[at + 3] = one, two, three, four
                continue
            for r in range(count):
                total = F(0.0)
                for i in range(width):
                    total += load(source, i) * load(weights, r * width + i)
                out[at + r] = total


@compiled
def up(kind, y, width, b, parts, most, ranks, rows, low, stride, pieces, first, last):
    """y[row, output] += low[row, part · most + r] · B[slot, r, output], summed over the adapter's ranks; the items
    [first, last) are rows of `pieces`, int64: part, first output, outputs (at most PIECE). The rest: as in `down`."""
    listed, rank_of, lows = integers(rows), integers(ranks), ptr(low, 0.0)
    piece, size = integers(pieces), element_size(kind)
    sums = np.empty(PIECE, np.float32)
    for item in range(first, last):
        part, begin, count = piece[3 * item], piece[3 * item + 1], piece[3 * item + 2]
        for number in range(listed[0]):
            row, slot = listed[1 + 2 * number], listed[2 + 2 * number]
            rank = rank_of[slot * parts + part]
            if rank == 0:
                continue
            weights = ptr(b + (slot * most * width + begin) * size, kind)
            target, at = ptr(y + (row * width + begin) * size, kind), row * stride + part * most
            for i in range(count):
                sums[i] = F(0.0)
            fours = rank // 4 * 4
            for r in range(0, fours, 4):
                one, two, three, four = lows[at + r], lows[at + r + 1], lows[at + r + 2], lows[at + r + 3]
                own = r * width
                for i in range(count):
                    sums[i] += (
                        one * load(weights, own + i)
                        + two * load(weights, own + width + i)
                        + three * load(weights, own + 2 * width + i)
                        + four * load(weights, own + 3 * width + i)
                    )
            for r in range(fours, rank):
                one, own = lows[at + r], r * width
                for i in range(count):
                    sums[i] += one * load(weights, own + i)
            for i in range(count):
                store(target, i, load(target, i) + sums[i])
    keep(sums)
