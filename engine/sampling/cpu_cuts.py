"""Cuts of whole rows on the CPU, compiled by numba, without sorting: a radix selection over the bits of the logits.

Every cut keeps the first tokens of a row, by falling logit, of equals the lower id first, until what they weigh together
reaches a limit: a number of tokens, or a probability. The first pass adds up the weights of all tokens whose logits begin
with the same 11 bits, and finds the bits at which the limit is reached; two more do the same for the next bits of the
tokens that begin so. A fourth decides by id between equal logits. The time does not depend on how many are kept.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.ops.cpu.codegen.llvm import as_u32, cached

U32, U64 = np.uint32, np.uint64
_BUCKETS = 2048
# Of a key: bits to the right of a pass's own, and of those before them.
_PASSES = ((U64(21), U64(32)), (U64(10), U64(21)), (U64(0), U64(10)))
_NEGATIVE, _MAGNITUDE = U32(0x80000000), U32(0x7FFFFFFF)


@njit
def _key(value):
    """Orders floats by falling value: the larger one has the smaller key, and both zeros the same."""
    bits = as_u32(value)
    if bits == _NEGATIVE:
        return _MAGNITUDE
    return bits if bits & _NEGATIVE else bits ^ _MAGNITUDE


@njit
def _keep_first(keys, weights, limit, kept):
    """Clears `kept` for all tokens before which those that come first weigh `limit` or more; the first of all stays.
    `weights` may be empty: every token then weighs 1. Sums are as they are written, without fast mathematics."""
    equal = weights.shape[0] == 0
    sums, numbers = np.empty(_BUCKETS, np.float64), np.empty(_BUCKETS, np.int64)
    border = U64(0)  # the first bits of the key at which the limit is reached
    before = 0.0  # weight of the tokens before it
    for shift, above in _PASSES:
        mask = (U64(1) << (above - shift)) - U64(1)
        sums[:] = 0.0
        numbers[:] = 0
        for i in range(keys.shape[0]):
            key = U64(keys[i])
            if key >> above == border:
                own = np.int64((key >> shift) & mask)
                sums[own] += 1.0 if equal else weights[i]
                numbers[own] += 1
        # If the limit is not reached, because of rounding or of NaN, it is the last bucket.
        last, found = 0.0, 0
        for bucket in range(_BUCKETS):
            if numbers[bucket] > 0:
                before += last
                last, found = sums[bucket], bucket
                if before + last >= limit:
                    break
        border = (border << (above - shift)) | U64(found)
    chosen = before == 0.0  # whether the next one is the first of all
    for i in range(keys.shape[0]):
        key = U64(keys[i])
        if key == border:
            if not (before < limit or chosen):
                kept[i] = False
            chosen = False
            before += 1.0 if equal else weights[i]
        elif key > border:
            kept[i] = False


def _cut_row(values, masses, total, top_k, top_p, min_p, kept):
    """kept bool [vocab], True where the cuts leave a token. `values` f32 [vocab]; `masses` f64 [vocab], relative to the
    largest, is overwritten; `total` is what they add up to, or negative: then what top-k and min-p leave."""
    count = values.shape[0]
    keys = np.empty(count, np.uint32)
    for i in range(count):
        keys[i] = _key(values[i])
        kept[i] = True
    if top_k > 0 and top_k < count:
        _keep_first(keys, masses[:0], np.float64(top_k), kept)
    rest = 0.0
    for i in range(count):
        kept[i] = kept[i] and masses[i] >= min_p
        if not kept[i]:
            masses[i] = 0.0
        rest += masses[i]
    if top_p < 1.0:
        _keep_first(keys, masses, top_p * (rest if total < 0.0 else total), kept)


cut_row = cached(_cut_row)
