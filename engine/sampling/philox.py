"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), a counter-based generator, by torch
on any device.

Every token of a vocabulary has a word of 32 random bits for each draw: word (token id mod 4) of the counter
(token id ÷ 4, as the last of position low, position high, choice, token id ÷ 4) under the key (seed low, seed high).
Defined bit for bit, so that a stream goes on elsewhere as if undisturbed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


class DrawKey(NamedTuple):
    """The key of one draw's noise, which depends on nothing else."""

    seed: int
    choice: int
    position: int  # of the token that is drawn, in prompt + output


def key_words(keys: Sequence[DrawKey]) -> NDArray[np.uint32]:
    """[keys, 5]: seed low and high, position low and high, choice. Numbers are taken modulo their width, so that no row's
    value fails the batch."""
    rows = [
        (
            key.seed & _MASK,
            key.seed >> 32 & _MASK,
            key.position & _MASK,
            key.position >> 32 & _MASK,
            key.choice & _MASK,
        )
        for key in keys
    ]
    return np.array(rows, dtype=np.uint32).reshape(len(rows), 5)


def philox4x32(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds on int64 tensors of 32-bit words; shapes broadcast. Products wrap at 64 bits, as they should."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32 & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            (p0 >> 32 & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = k0 + _W0 & _MASK, k1 + _W1 & _MASK
    return c0, c1, c2, c3


def words(token_ids: Tensor, keys: Tensor) -> Tensor:
    """int64 [rows, tokens]: the words of `token_ids` [rows or 1, tokens] under `keys`, int64 [rows, 5] as `key_words`."""
    k0, k1, p0, p1, choice = keys[:, :, None].unbind(1)
    shape = (keys.shape[0], token_ids.shape[1])
    four = torch.stack(philox4x32((p0, p1, choice, (token_ids >> 2).expand(shape)), (k0, k1)))
    return four.gather(0, (token_ids & 3).expand(shape)[None])[0]


def all_words(tokens: int, keys: Tensor) -> Tensor:
    """int64 [rows, tokens]: the words of tokens 0, 1, 2 …; four of them are one call of the generator."""
    k0, k1, p0, p1, choice = keys[:, :, None].unbind(1)
    counters = torch.arange(-(-tokens // 4), device=keys.device)[None].expand(keys.shape[0], -1)
    four = torch.stack(philox4x32((p0, p1, choice, counters), (k0, k1)), -1)
    return four.flatten(1)[:, :tokens]
