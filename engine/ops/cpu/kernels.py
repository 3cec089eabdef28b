"""Kernels for the CPU, compiled by numba for the machine and cached on disk.

They take addresses of contiguous tensors, not arrays: then a call costs 0.3 µs, and a decode step makes a hundred.
`kind` is the dtype behind the addresses, `stored` that of the KV cache (engine/ops/cpu/codegen/elements.py).
`dim8` is a tuple of length head_dim / 8: the length is part of its type, so that loops over it have a constant length.
All sums are float32. Arguments are not checked: engine/ops/cpu/ops.py and engine/attention/paged_cpu.py own the
tensors that they pass.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import njit

from engine.ops.cpu.codegen.elements import (
    CODES,
    F,
    element_size,
    exp,
    load,
    ptr,
    row_elements,
    scale_tokens,
    store,
    store_row,
)
from engine.ops.cpu.codegen.llvm import (
    cached,
    compiled,
    compiled_exactly,
    halves,
    indices,
    integers,
    prefetch_line,
)

# --- between the products ---------------------------------------------------------------------------------


@compiled
def embed_rows(kind, table, rows, out, width, first, last, scale):
    """out[i] = scale · table[rows[i]] for i in [first, last); rows are int64, `width` elements each."""
    source, target, row_of = ptr(table, kind), ptr(out, kind), integers(rows)
    for row in range(first, last):
        at = row_of[row] * width
        for i in range(width):
            store(target, row * width + i, load(source, at + i) * F(scale))


@compiled
def add_norm(kind, x, delta, weight, out, first, last, width, eps, wide):
    """x += delta (unless its address is 0), out = RMS norm of x. Rows [first, last) of `width`. `wide`: the weight is
    float32, whatever `kind` is."""
    xs, ds, ys = ptr(x, kind), ptr(delta, kind), ptr(out, kind)
    for row in range(first, last):
        base = row * width
        if delta:
            for i in range(width):
                store(xs, base + i, load(xs, base + i) + load(ds, base + i))
        total = F(0.0)
        for i in range(width):
            value = load(xs, base + i)
            total += value * value
        scale = F(1.0) / np.sqrt(total / F(width) + F(eps))
        if wide:
            _scale_row(xs, ptr(weight, 0.0), ys, base, width, scale)
        else:
            _scale_row(xs, ptr(weight, kind), ys, base, width, scale)


@compiled_exactly
def _scale_row(xs, weights, ys, base, width, scale):
    """Multiplies in the order that is written, without fast-math: where `ys` is `xs`, as in lists of jobs, another version
    of the loop runs, and it must round alike."""
    for i in range(width):
        store(ys, base + i, load(xs, base + i) * scale * load(weights, i))


@compiled
def silu_mul(kind, gate_up, out, first, last, width):
    """out = silu(gate) · up; gate_up rows are [gate | up], `width` each."""
    both, ys = ptr(gate_up, kind), ptr(out, kind)
    for row in range(first, last):
        base = row * 2 * width
        for i in range(width):
            gate = load(both, base + i)
            # e^-|g| never overflows: silu(g) = g / (1 + e^-g) = g · e^g / (1 + e^g)
            small = exp(-abs(gate))
            top = F(1.0) if gate >= F(0.0) else small
            store(ys, row * width + i, gate * top / (F(1.0) + small) * load(both, base + width + i))


@njit(inline="always")
def _sigmoid(x):
    """By e^-|x|, which never overflows."""
    small = exp(-abs(x))
    return (F(1.0) if x >= F(0.0) else small) / (F(1.0) + small)


@compiled
def gelu_mul(kind, gate_up, out, first, last, width):
    """out = gelu(gate) · up, gelu by tanh: x · (1 + tanh u) / 2 = x · sigmoid(2u), u = √(2/π) · (x + 0.044715 x³)."""
    both, ys = ptr(gate_up, kind), ptr(out, kind)
    for row in range(first, last):
        base = row * 2 * width
        for i in range(width):
            x = load(both, base + i)
            twice = F(1.5957691216057308) * (x + F(0.044715) * x * x * x)
            store(ys, row * width + i, x * _sigmoid(twice) * load(both, base + width + i))


@compiled
def clamped_swiglu(kind, gate_up, out, first, last, width, alpha, limit):
    """out = g · sigmoid(alpha · g) · (u + 1), where g = min(gate, limit) and u = max(-limit, min(up, limit)). NaN stays
    NaN: the logits' check for numbers that are not finite finds it."""
    both, ys = ptr(gate_up, kind), ptr(out, kind)
    for row in range(first, last):
        base = row * 2 * width
        for i in range(width):
            gate, up = load(both, base + i), load(both, base + width + i)
            gate = limit if gate > limit else gate
            up = limit if up > limit else up
            up = -limit if up < -limit else up
            store(ys, row * width + i, gate * _sigmoid(alpha * gate) * (up + F(1.0)))


@compiled
def rotate_and_store(
    kind, stored, qkv, first, last, heads, kv, dim8,
    cosine, sine, positions, slots, cache, layer, block_stride, page,
    q_norm, k_norm, eps, wide,
):  # fmt: skip
    """Norm (if the model has norms; `wide` as in add_norm) and rotate queries and keys in place; write keys and values to
    the cache.

    qkv rows are [q heads | k heads | v heads]; cosine and sine are float32 [positions, head_dim / 2];
    slots[row] = block · page + offset; `layer` is the element offset of the layer in a block.
    """
    dim, half = 8 * len(dim8), 4 * len(dim8)
    rows, plane = ptr(qkv, kind), page * row_elements(stored, dim)
    cos, sin = ptr(cosine, 0.0), ptr(sine, 0.0)
    where, places = integers(positions), integers(slots)
    for row in range(first, last):
        base = row * (heads + 2 * kv) * dim
        angle = where[row] * half
        block, offset = places[row] // page, places[row] % page
        target = block * block_stride + layer
        for head in range(heads + kv):
            at = base + head * dim
            weight = q_norm if head < heads else k_norm
            if weight:
                ws, wide_ws = ptr(weight, kind), ptr(weight, 0.0)
                total = F(0.0)
                for i in range(dim):
                    total += load(rows, at + i) * load(rows, at + i)
                scale = F(1.0) / np.sqrt(total / F(dim) + F(eps))
                if wide:
                    for i in range(dim):
                        store(rows, at + i, load(rows, at + i) * scale * wide_ws[i])
                else:
                    for i in range(dim):
                        store(rows, at + i, load(rows, at + i) * scale * load(ws, i))
            for i in range(half):
                low, high = load(rows, at + i), load(rows, at + half + i)
                c, s = cos[angle + i], sin[angle + i]
                store(rows, at + i, low * c - high * s)
                store(rows, at + half + i, high * c + low * s)
        for head in range(kv):
            key, value = base + (heads + head) * dim, base + (heads + kv + head) * dim
            store_row(stored, rows, key, cache, target + head * plane, page, offset, dim)
            store_row(stored, rows, value, cache, target + (kv + head) * plane, page, offset, dim)


# --- attention of single tokens -----------------------------------------------------------------------------


@njit(inline="always")
def _prefetch_range(address, size):
    for line in range(0, size, 64):
        prefetch_line(address + line)


@compiled
def _scores(keys, coming, size, plane, kv, group, tokens, dim8, q, out):
    """out[head, token] = q[head] · key[token] for the first `tokens` of a block; prefetches block `coming`."""
    dim = 8 * len(dim8)
    for head in range(kv):
        for token in range(tokens):
            row = head * plane + token * dim
            _prefetch_range(coming + row * size, dim * size)
            for g in range(0, group - 1, 2):
                one, two = F(0.0), F(0.0)
                for i in range(dim):
                    key = load(keys, row + i)
                    one += q[head * group + g, i] * key
                    two += q[head * group + g + 1, i] * key
                out[head * group + g, token] = one
                out[head * group + g + 1, token] = two
            if group % 2:
                one = F(0.0)
                for i in range(dim):
                    one += q[head * group + group - 1, i] * load(keys, row + i)
                out[head * group + group - 1, token] = one


@compiled
def _mix(values, coming, size, plane, kv, group, tokens, dim8, p, acc):
    """acc[head] += p[head, token] · value[token] for the first `tokens` of a block; prefetches block `coming`.
    Four at a time: fewer loads and stores of the sums. Nothing behind them is read: 0 · NaN of stale KV is NaN."""
    dim = 8 * len(dim8)
    fours = tokens // 4 * 4
    for head in range(kv):
        for token in range(fours, tokens):
            row = head * plane + token * dim
            for g in range(head * group, head * group + group):
                a = p[g, token]
                for i in range(dim):
                    acc[g, i] += a * load(values, row + i)
        for token in range(0, fours, 4):
            row = head * plane + token * dim
            _prefetch_range(coming + row * size, 4 * dim * size)
            for g in range(head * group, head * group + group):
                a, b, c, d = p[g, token], p[g, token + 1], p[g, token + 2], p[g, token + 3]
                for i in range(dim):
                    acc[g, i] += (
                        a * load(values, row + i)
                        + b * load(values, row + dim + i)
                        + c * load(values, row + 2 * dim + i)
                        + d * load(values, row + 3 * dim + i)
                    )


@compiled
def attend_tokens(
    kind, stored, q, q_stride, out, singles, starts, rows, ends, table, width, first, last,
    cache, layer, block_stride, kv, group, page, dim8, window, scale, cap, sinks,
):  # fmt: skip
    """One query row for each of `singles`, against its own blocks, oldest first: [first, last) of all their KV heads.

    Of item i, starts[i] is its row in q (rows `q_stride` elements apart) and in out [row, heads · dim], rows[i] its row
    in table [row, width] of block numbers, ends[i] its tokens. A block's keys lie together for all heads, so blocks are
    the outer loop over those heads of an item that are in the range. `sinks`: as in _softmax, of all heads.
    """
    dim, heads = 8 * len(dim8), kv * group
    size, plane = element_size(stored), page * row_elements(stored, dim)
    queries, mixed = ptr(q, kind), ptr(out, kind)
    item_of, row_of, end_of = indices(singles), indices(starts), indices(ends)
    table_row, table = indices(rows), indices(table)
    values = kv * plane
    scaled = np.empty((heads, dim), np.float32)
    acc = np.empty((heads, dim), np.float32)
    unit = first
    while unit < last:
        head = unit % kv  # the first of `some` KV heads
        number, some = item_of[unit // kv], min(kv - head, last - unit)
        unit += some
        row, own = np.int64(row_of[number]), np.int64(table_row[number]) * width
        end = np.int64(end_of[number])
        begin = max(0, end - window) if window else 0
        low, high = begin // page, (end + page - 1) // page
        count, at = some * group, (row * heads + head * group) * dim
        weights = np.empty((count, (high - low) * page), np.float32)
        for one in range(count):
            for i in range(dim):
                scaled[one, i] = load(queries, row * q_stride + (head * group + one) * dim + i) * F(scale)
                acc[one, i] = F(0.0)
        keys = layer + head * plane
        for index in range(low, high):
            block = cache + (np.int64(table[own + index]) * block_stride + keys) * size
            following = np.int64(table[own + (index + 1 if index + 1 < high else low)]) * block_stride + keys
            coming = cache + (following + (0 if index + 1 < high else values)) * size
            used, part = min(page, end - index * page), weights[:, (index - low) * page :]
            _scores(ptr(block, stored), coming, size, plane, some, group, used, dim8, scaled, part)
            scale_tokens(stored, block, coming, plane, some, group, page, used, dim, part)
        if cap > F(0.0):
            _cap_scores(weights, count, end - low * page, cap)
        _softmax(
            weights, count, begin - low * page, end - low * page, sinks + head * group * 4 if sinks else sinks
        )
        for index in range(low, high):
            block = cache + (np.int64(table[own + index]) * block_stride + keys + values) * size
            following = np.int64(table[own + min(index + 1, high - 1)]) * block_stride + keys + values
            coming = cache + following * size
            used, part = min(page, end - index * page), weights[:, (index - low) * page :]
            scale_tokens(stored, block, coming, plane, some, group, page, used, dim, part)
            _mix(ptr(block, stored), coming, size, plane, some, group, used, dim8, part, acc)
        for one in range(count):
            for i in range(dim):
                store(mixed, at + one * dim + i, acc[one, i])


@compiled
def _cap_scores(weights, heads, end, cap):
    """cap · tanh(score / cap), of the scores of tokens [0, end)."""
    for head in range(heads):
        row = weights[head][:end]
        for i in range(row.shape[0]):
            small = exp(F(-2.0) * abs(row[i]) / cap)
            size = cap * (F(1.0) - small) / (F(1.0) + small)
            row[i] = size if row[i] >= F(0.0) else -size


@compiled
def _softmax(weights, heads, begin, end, sinks):
    """Softmax over tokens [begin, end). Earlier tokens get weight 0; later ones have no score and are not read. `sinks`:
    the address of the heads' attention sinks, float32 [heads]; 0: the model has none."""
    logits = ptr(sinks, 0.0)
    for head in range(heads):
        whole = weights[head]
        row = whole[begin:end]
        top = logits[head] if sinks else row[0]
        for i in range(row.shape[0]):
            top = row[i] if row[i] > top else top
        total = exp(logits[head] - top) if sinks else F(0.0)
        for i in range(row.shape[0]):
            row[i] = exp(row[i] - top)
            total += row[i]
        share = F(1.0) / total
        for i in range(row.shape[0]):
            row[i] *= share
        whole[:begin] = F(0.0)


# --- attention over prompts -----------------------------------------------------------------------------------


@compiled
def gather_int8(kind, cache, layer, block_stride, table, page, end, dim8, out, first, last):
    """The numbers of the first `end` tokens of a sequence whose blocks are int8: out[item, token, dim]; item: K or V of a
    KV head."""
    dim, numbers, blocks = 8 * len(dim8), ptr(out, kind), indices(table)
    plane = page * row_elements(CODES, dim)
    for item in range(first, last):
        for index in range((end + page - 1) // page):
            head = cache + np.int64(blocks[index]) * block_stride + layer + item * plane
            codes, scales = ptr(head, CODES), halves(head + page * dim)
            to = (item * end + index * page) * dim
            for token in range(min(page, end - index * page)):
                scale = load(scales, token)
                for i in range(token * dim, (token + 1) * dim):
                    store(numbers, to + i, load(codes, i) * scale)


@compiled
def _softmax_rows(kind, scores, count, keys, rows, offset, window, sinks):
    """Softmax in place over the visible ones of `keys` scores, in each of `count` rows. The rows of the heads of a group
    follow each other, `rows` a head; the key of row i itself is number offset + i % rows. `sinks`: as in _softmax."""
    values, logits = ptr(scores, kind), ptr(sinks, 0.0)
    whole = np.empty(keys, np.float32)
    for row in range(count):
        end = min(offset + row % rows + 1, keys)
        begin = max(0, end - window) if window else 0
        at = row * keys + begin
        line = whole[begin:end]
        top = logits[row // rows] if sinks else load(values, at)
        for i in range(line.shape[0]):
            value = load(values, at + i)
            top = value if value > top else top
        total = exp(logits[row // rows] - top) if sinks else F(0.0)
        for i in range(line.shape[0]):
            value = exp(load(values, at + i) - top)
            line[i] = value
            total += value
        share = F(1.0) / total
        for i in range(line.shape[0]):
            store(values, at + i, line[i] * share)
        for i in range(row * keys, at):
            store(values, i, F(0.0))
        for i in range(at + line.shape[0], (row + 1) * keys):
            store(values, i, F(0.0))


@functools.lru_cache(None, typed=True)  # 0 and 0.0 are two kinds
def softmax_rows(kind: int | float) -> Any:
    """`_softmax_rows` of this kind, for callers in Python."""

    def softmax(scores, count, keys, rows, offset, window, sinks):
        _softmax_rows(kind, scores, count, keys, rows, offset, window, sinks)

    return cached(softmax, kind)
