"""Masks of the tokens that may be drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.compiled_grammar import Words
from engine.sampling.grammar.base import word_count


def mask_of(bitmap: bytes, vocab: int) -> Words:
    """The mask of a bitmap that has a bit for each token id, the lowest first. Raises ValueError for one that is longer
    than the vocabulary."""
    words = np.zeros(word_count(vocab), dtype=np.int64)
    words.view(np.uint8)[: len(bitmap)] = np.frombuffer(bitmap, dtype=np.uint8)
    return words


def allows_only(mask: Words, token_ids: Sequence[int]) -> bool:
    """Whether the mask allows no other tokens than these."""
    rest = mask.view(np.uint8).copy()
    for token in token_ids:
        rest[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return not rest.any()
