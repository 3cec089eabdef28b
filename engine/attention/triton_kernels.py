"""Paged attention for CUDA. Importing it needs Triton.

    prompts   a program per tile of one sequence's tokens and KV head: all keys that the tile sees, block by block
    tokens    for items of one token: the keys are split, and a few programs per item and KV head compute the splits in
              turn, a partial result each; the program that ends last merges them in the order of the splits

What a token gets depends on its own sequence only: how keys are split follows from their number, tiles begin with their
item, and key blocks lie at multiples of their size. Queries of a KV head's group are rows of one product.

ROW: elements of the cache for each token of a head. In int8 (cluster/protocol/kv_format.py) it is more than DIM.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.cuda.interpreter import INTERPRETED
from engine.ops.cuda.kv_codes import load_scales, numbers

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def operand(x):
    if INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def attend_block(
    q, keys, values, table, start, last, at, oldest, scale, block_stride, mixed, largest, weights,
    DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One step of attend_keys, over keys [start, start + KEYS); returns its three results. MASKED: rows see only some of
    these keys, or some are behind the sequence's last. Of codes, scores are multiplied by the keys' scales and weights by
    the values', so that codes are only converted."""
    key = start + tl.arange(0, KEYS)
    column = tl.arange(0, WIDTH)
    there = key < last
    if MASKED:
        block = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // PAGE).to(tl.int64)
    row = block * block_stride + (key % PAGE) * DIM
    at_k, at_v = keys + row[None, :] + column[:, None], values + row[:, None] + column[None, :]
    inside = column < DIM
    if MASKED:
        k = tl.load(at_k, mask=there[None, :] & inside[:, None], other=0.0)
        v = tl.load(at_v, mask=there[:, None] & inside[None, :], other=0.0)
    elif DIM < WIDTH:
        k = tl.load(at_k, mask=inside[:, None], other=0.0)
        v = tl.load(at_v, mask=inside[None, :], other=0.0)
    else:
        k = tl.load(at_k)
        v = tl.load(at_v)
    if ROW > DIM:
        of_scale = block * block_stride + PAGE * DIM + (key % PAGE) * (ROW - DIM)
        k_scale = load_scales(keys + of_scale, there, MASKED) * scale
        v_scale = load_scales(values + of_scale, there, MASKED)
        score = tl.dot(operand(q), numbers(k, q), input_precision="ieee") * k_scale[None, :]
    else:
        score = tl.dot(operand(q), operand(k), input_precision="ieee") * scale
    if CAP > 0:
        small = tl.exp2(tl.abs(score) * (-2 * LOG2_E / CAP))  # never overflows
        size = CAP * (1.0 - small) / (1.0 + small)
        score = tl.where(score < 0.0, -size, size)
    if MASKED:
        seen = (key[None, :] <= at[:, None]) & (key[None, :] >= oldest[:, None]) & there[None, :]
        score = tl.where(seen, score, float("-inf"))
    new = tl.maximum(largest, tl.max(score, 1))
    base = tl.where(new == float("-inf"), 0.0, new)  # of rows that have seen no key yet
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(largest - base)
    weights = weights * fade + tl.sum(weight, 1)
    if ROW > DIM:
        product = tl.dot(
            operand((weight * v_scale[None, :]).to(q.dtype)), numbers(v, q), input_precision="ieee"
        )
    else:
        product = tl.dot(operand(weight.to(v.dtype)), operand(v), input_precision="ieee")
    return mixed * fade[:, None] + product, new, weights


@triton.jit
def attend_keys(
    q, keys, values, table, first, last, at, oldest, nearest, scale, block_stride,
    DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, CAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Walk over keys [first, last) of the sequence in this row of the table. q [ROWS, WIDTH]; row r sees [oldest, at];
    `nearest` is the smallest `at`. Scores are binary logarithms; with a CAP they become CAP · tanh(score / CAP).

    Returns the weighted values, not divided yet; the largest score; the sum of weights. Of the last block only the
    sequence's own keys are read: the rest may hold NaN.
    """
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    weights = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    edge = first
    if not WINDOWED:
        # Without a window, every row sees all keys up to `nearest`: whole blocks of them need no mask.
        edge = first + tl.maximum(tl.minimum(nearest + 1, last) - first, 0) // KEYS * KEYS
        for start in range(first, edge, KEYS):
            mixed, largest, weights = attend_block(
                q, keys, values, table, start, last, at, oldest, scale, block_stride, mixed, largest, weights,
                DIM, ROW, WIDTH, PAGE, KEYS, CAP, False,
            )  # fmt: skip
    for start in range(edge, last, KEYS):
        mixed, largest, weights = attend_block(
            q, keys, values, table, start, last, at, oldest, scale, block_stride, mixed, largest, weights,
            DIM, ROW, WIDTH, PAGE, KEYS, CAP, True,
        )  # fmt: skip
    return mixed, largest, weights


@triton.jit
def sink_weight(sinks, there, largest):
    """The share of attention sinks in sums of weights. `sinks`: addresses of their logits; `largest`: the rows' largest
    scores, binary logarithms, to which the weights are relative. It is bounded, so that a sum stays finite where all
    scores are far below the sink; the row's result is then 0."""
    return tl.exp2(tl.minimum(tl.load(sinks, mask=there, other=0.0) * LOG2_E - largest, 126.0))


@triton.jit(do_not_specialize=["items", "window"])
def attend_prompts(
    q, cache, table, rows, ends, cu_q, sinks, out, items, window, scale,
    q_stride, head_stride, table_stride, block_stride, value_offset,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Items of more than one token. `cache`: the layer's keys of the first block. `sinks`: as in sink_weight."""
    tokens: tl.constexpr = ROWS // GROUP  # of a tile
    # An item's last tiles have the most keys, so they are launched first: otherwise they would end long after the others.
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    # Tiles of item i begin at cu_q[i] // tokens + i: as many as there may be. The last item that begins here or before:
    low, high = 0, items
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_q + middle) // tokens + middle <= tile:
            low = middle
        else:
            high = middle
    begin = tl.load(cu_q + low)
    count = tl.load(cu_q + low + 1) - begin
    done = (tile - begin // tokens - low) * tokens
    if (count == 1) | (done >= count):
        return
    row = tl.arange(0, ROWS)
    token = done + row // GROUP
    there = (token < count) & (row < tokens * GROUP)
    query_head = head * GROUP + row % GROUP
    column = tl.arange(0, WIDTH)
    mask = there[:, None] & (column < DIM)[None, :]
    at_q = (begin + token).to(tl.int64) * q_stride + query_head * head_stride
    tile_q = tl.load(q + at_q[:, None] + column[None, :], mask=mask, other=0.0)
    end = tl.load(ends + low)
    position = end - count + token
    oldest = tl.maximum(position - window + 1, 0)
    first = tl.maximum(end - count + done - window + 1, 0) // KEYS * KEYS
    last = tl.minimum(end, end - count + done + tokens)
    of_row = table + tl.load(rows + low).to(tl.int64) * table_stride
    of_head = cache + head.to(tl.int64) * (PAGE * ROW)
    mixed, largest, weights = attend_keys(
        tile_q, of_head, of_head + value_offset, of_row, first, last, position, oldest, end - count + done, scale,
        block_stride, DIM, ROW, WIDTH, PAGE, ROWS, KEYS, CAP, WINDOWED,
    )  # fmt: skip
    if SINKS:
        weights += sink_weight(sinks + query_head, there, largest)
    heads = tl.num_programs(1) * GROUP
    at_out = ((begin + token).to(tl.int64) * heads + query_head) * DIM
    result = mixed / tl.where(there, weights, 1.0)[:, None]
    tl.store(out + at_out[:, None] + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def split_keys(end, window, KEYS: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """Where the keys that the last of `end` tokens sees begin, and the length of their splits."""
    first = tl.maximum(end - window, 0) // KEYS * KEYS
    length = (end - first + SPLITS - 1) // SPLITS
    return first, tl.maximum((length + KEYS - 1) // KEYS * KEYS, SPLIT)


@triton.jit
def merge_splits(
    partial, sums, sinks, out, first_head, there, at_item,
    GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one sequence and KV head. Always over SPLITS entries, of which those that the sequence
    lacks count nothing: in one order, whichever program merges. What other programs wrote is read from the second-level
    cache."""
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, WIDTH)
    inside = column < DIM
    mask = there[:, None] & inside[None, :]
    for member in tl.static_range(GROUP):  # a loop spills registers in fp32 on sm_90
        part = (first_head + member) * SPLITS + split
        largest = tl.load(sums + 2 * part, mask=there, other=float("-inf"), cache_modifier=".cg")
        own = tl.load(sums + 2 * part + 1, mask=there, other=0.0, cache_modifier=".cg")
        share = tl.exp2(largest - tl.max(largest, 0))
        weights = tl.sum(share * own, 0)
        if SINKS:
            weights += sink_weight(sinks + member, True, tl.max(largest, 0))
        at = partial + part[:, None] * DIM + column[None, :]
        mixed = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        result = tl.sum(mixed * share[:, None], 0) / weights
        tl.store(out + (at_item + member) * DIM + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["window"])
def attend_tokens(
    q, cache, table, rows, ends, cu_q, singles, partial, sums, arrived, sinks, out, window, scale,
    q_stride, head_stride, table_stride, block_stride, value_offset,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROW: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    CAP: tl.constexpr, SINKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """partial [singles, heads, SPLITS, DIM], sums [singles, heads, SPLITS, 2] (largest score, sum of weights): float32;
    arrived [singles, KV heads]: 0 before and after. A sequence's programs compute its splits in turn."""
    single, head, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    item = tl.load(singles + single)
    end = tl.load(ends + item)
    begin, length = split_keys(end, window, KEYS, SPLIT, SPLITS)
    count = (end - begin + length - 1) // length
    if program >= count:
        return
    row = tl.arange(0, ROWS)
    there = row < GROUP
    query_head = head * GROUP + row
    column = tl.arange(0, WIDTH)
    mask = there[:, None] & (column < DIM)[None, :]
    of_item = tl.load(cu_q + item).to(tl.int64)
    tile_q = tl.load(
        q + (of_item * q_stride + query_head * head_stride)[:, None] + column[None, :], mask=mask, other=0.0
    )
    position = tl.full([ROWS], 0, tl.int32) + (end - 1)
    oldest = tl.maximum(position - window + 1, 0)
    of_row = table + tl.load(rows + item).to(tl.int64) * table_stride
    of_head = cache + head.to(tl.int64) * (PAGE * ROW)
    heads = tl.num_programs(1) * GROUP
    for split in range(program, count, tl.num_programs(2)):
        first = begin + split * length
        mixed, largest, weights = attend_keys(
            tile_q, of_head, of_head + value_offset, of_row, first, tl.minimum(first + length, end), position, oldest,
            end - 1, scale, block_stride, DIM, ROW, WIDTH, PAGE, ROWS, KEYS, CAP, WINDOWED,
        )  # fmt: skip
        if count == 1:  # the result of a merge with one split
            if SINKS:
                weights += sink_weight(sinks + query_head, there, largest)
            at_out = out + ((of_item * heads + query_head) * DIM)[:, None] + column[None, :]
            result = mixed / tl.where(there, weights, 1.0)[:, None]
            tl.store(at_out, result.to(out.dtype.element_ty), mask=mask)
        else:
            part = (single.to(tl.int64) * heads + query_head) * SPLITS + split
            tl.store(partial + part[:, None] * DIM + column[None, :], mixed, mask=mask)
            tl.store(sums + 2 * part, largest, mask=there)
            tl.store(sums + 2 * part + 1, weights, mask=there)
    if count > 1:
        # The barrier puts this program's stores before the release of the addition, and the addition's acquire comes
        # before the loads of the program that arrives last. No program waits for another.
        tl.debug_barrier()
        place = arrived + single * tl.num_programs(1) + head
        before = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu")
        if before == tl.minimum(count, tl.num_programs(2)) - 1:
            merge_splits(
                partial, sums, sinks + head * GROUP, out, single.to(tl.int64) * heads + head * GROUP,
                begin + tl.arange(0, SPLITS) * length < end, of_item * heads + head * GROUP,
                GROUP, DIM, WIDTH, SINKS, SPLITS,
            )  # fmt: skip
            tl.store(place, 0)
