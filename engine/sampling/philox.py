"""uniform(seed, choice, position): Philox4x32-10 (Salmon et al., SC11), one draw a row.

The counter is (position low, position high, choice, 0), the key the seed's two halves; the draw is the first two
output words as a 53-bit fraction. Defined bit for bit, so that a stream goes on elsewhere as if undisturbed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
U64 = NDArray[np.uint64]


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Ten rounds on rows of 32-bit words held in uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + np.uint64(_W0)) & _MASK, (k1 + np.uint64(_W1)) & _MASK
    return c0, c1, c2, c3


def uniform(seeds: list[int], choices: list[int], positions: list[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per row. Arguments are taken modulo their width, so that no row's value fails the batch."""
    seed, position, choice = (
        np.array([number & 0xFFFFFFFFFFFFFFFF for number in column], dtype=np.uint64)
        for column in (seeds, positions, choices)
    )
    counter = (position & _MASK, position >> _SHIFT, choice & _MASK, np.zeros_like(choice))
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> _SHIFT))
    bits = (high << np.uint64(21)) | (low >> np.uint64(11))
    return bits.astype(np.float64) * (1.0 / (1 << 53))
