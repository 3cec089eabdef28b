"""The draw on the CPU, compiled by numba: all tokens of a row in about 0.3 µs per thousand.

Few tokens can be the largest, so the two logarithms of the noise are taken for those alone. Philox itself runs for every
block of tokens in which one is within reach of the best so far, in vector registers. What is left out is proved to be
smaller: noise is at most HIGHEST, and 1 - u ≤ -log(u) bounds a token's noise by its word, whose binary logarithm the
bits of a float give to within 0.09 from below.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from engine.ops.cpu.codegen.llvm import as_u32, cached

F, U32, U64 = np.float32, np.uint32, np.uint64
_M0, _M1 = U64(0xD2511F53), U64(0xCD9E8D57)
_W0, _W1 = U32(0x9E3779B9), U32(0xBB67AE85)
_HALF = U64(32)
_LOG2E = F(1.4426950408889634)
_BLOCK = 256  # tokens whose words are computed at once: 1 KiB
_HIGHEST = F(22.9)  # noise of the largest word: -log(-log(1 - 2⁻³³)) = 22.87
_ALL = U32(0xFFFFFFFF)
# The bits of a float as an integer, times 2⁻²³, less 127: its binary logarithm, too low by at most 0.09. 32 more, because
# a word is 2³² times its fraction.
_TO_EXPONENT, _BIAS = F(2.0**-23), F(159.0)
_SMALLEST = F(-3.4e38)


@njit
def _perturbed(value, temperature, word):
    """In double precision and without fast mathematics: the same number wherever it is computed."""
    return np.float64(value) / temperature - math.log(-math.log((np.float64(word) + 0.5) * 2.0**-32))


@njit(inline="always")
def _round(c0, c1, c2, c3, k0, k1):
    p0, p1 = _M0 * U64(c0), _M1 * U64(c2)
    return U32(p1 >> _HALF) ^ c1 ^ k0, U32(p1), U32(p0 >> _HALF) ^ c3 ^ k1, U32(p0)


@njit(inline="always")
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10, see engine/sampling/philox.py. Written out: a loop of rounds inside is not vectorised."""
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = U32(k0 + _W0), U32(k1 + _W1)
    return _round(c0, c1, c2, c3, k0, k1)


@njit
def _words_of_block(out, first, count, p0, p1, choice, k0, k1):
    """Words of the tokens first … first + count - 1; `first` is a multiple of 4. May write 3 words more."""
    counter = U32(first >> 2)
    for j in range((count + 3) >> 2):
        a, b, c, d = _philox(p0, p1, choice, U32(counter + U32(j)), k0, k1)
        out[4 * j] = a
        out[4 * j + 1] = b
        out[4 * j + 2] = c
        out[4 * j + 3] = d


@njit
def _words_of_ids(out, ids, p0, p1, choice, k0, k1):
    for j in range(ids.shape[0]):
        token = ids[j]
        a, b, c, d = _philox(p0, p1, choice, U32(token >> 2), k0, k1)
        low = b if token & 1 else a
        high = d if token & 1 else c
        out[j] = high if token & 2 else low


@njit(inline="always")
def _reaches(value, word, inverse, base):
    """Whether a token may be larger than `base`; false only where it can't."""
    bits = as_u32(F(_ALL ^ word))
    logarithm = F(np.int32(bits)) * _TO_EXPONENT - _BIAS
    return logarithm <= (value * inverse - base) * _LOG2E


def _draw_rows(values, ids, temperatures, keys, chosen):
    """values f32 [rows, columns]; ids i64 [rows, columns], or [0, 0]: a column is the token itself; temperatures f64
    [rows]; keys u32 [rows, 5]: seed low, seed high, position low, position high, choice; chosen i64 [rows] is written."""
    rows, columns = values.shape
    listed = ids.shape[0] > 0
    noise = np.empty(_BLOCK, np.uint32)
    for row in range(rows):
        k0, k1, p0, p1, choice = keys[row, 0], keys[row, 1], keys[row, 2], keys[row, 3], keys[row, 4]
        temperature = temperatures[row]
        inverse = F(1.0 / temperature)
        best, token_of_best = -np.inf, -1
        base = _SMALLEST  # at most `best`, by more than the rounding of fp32
        for first in range(0, columns, _BLOCK):
            size = min(_BLOCK, columns - first)
            part = values[row, first : first + size]
            near = 0  # a count and no maximum: a maximum of floats is not vectorised
            for i in range(size):
                near += part[i] * inverse >= base - _HIGHEST
            if near == 0:
                continue
            if listed:
                _words_of_ids(noise, ids[row, first : first + size], p0, p1, choice, k0, k1)
            else:
                _words_of_block(noise, first, size, p0, p1, choice, k0, k1)
            hits = 0
            for i in range(size):
                hits += _reaches(part[i], noise[i], inverse, base)
            if hits == 0:
                continue
            for i in range(size):
                if not _reaches(part[i], noise[i], inverse, base):
                    continue
                number = _perturbed(part[i], temperature, noise[i])
                token = ids[row, first + i] if listed else first + i
                if number > best or (number == best and token < token_of_best):
                    best, token_of_best = number, token
                    base = F(best - (1e-3 + 1e-6 * abs(best)))
        chosen[row] = token_of_best


draw_rows = cached(_draw_rows)
