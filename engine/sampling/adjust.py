"""Logit bias, penalties, forbidden tokens and masks, for all rows of a step at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.compiled_grammar import Words
from engine.sampling.row import Row

# Bound on logits after the repetition penalty: still finite when divided by the lowest temperature
LARGEST_LOGIT = 1e30


@dataclass
class _Entries:
    """Single logits of several rows, and a number for each."""

    rows: list[int] = field(default_factory=list)
    ids: list[NDArray[np.int64]] = field(default_factory=list)
    numbers: list[NDArray[np.floating[Any]]] = field(default_factory=list)

    def add(self, row: int, ids: NDArray[np.int64], numbers: NDArray[np.floating[Any]]) -> None:
        self.rows.append(row)
        self.ids.append(ids)
        self.numbers.append(numbers)

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Rows, ids and numbers."""
        rows = np.repeat(np.array(self.rows, dtype=np.int64), [len(ids) for ids in self.ids])
        return rows, np.concatenate(self.ids), np.concatenate(self.numbers).astype(np.float64)


T = TypeVar("T")
# Of bias, repetition, frequency, forbidden: rows, ids, numbers. Of masks: rows, their words.
Changes = list[tuple[T, ...] | None]


class Adjustments:
    """Collects what changes logits, row by row, for `apply`."""

    def __init__(self, vocab: int):
        self._vocab = vocab
        self._bias, self._repetition, self._frequency, self._forbidden = (_Entries() for _ in range(4))
        self._masks: dict[int, Words] = {}  # by row

    def __bool__(self) -> bool:
        kinds = (self._bias, self._repetition, self._frequency, self._forbidden)
        return bool(self._masks) or any(one.rows for one in kinds)

    def add(self, number: int, row: Row) -> None:
        """Raises IndexError for an id beyond the vocabulary; nothing of the row is added then."""
        params = row.params
        bias = params.logit_bias
        if bias and not (min(bias) >= 0 and max(bias) < self._vocab):
            raise IndexError(f"logit_bias names a token beyond the vocabulary of {self._vocab}")
        if params.bad_words and params.word_endings.largest_id >= self._vocab:
            raise IndexError(f"bad_words name a token beyond the vocabulary of {self._vocab}")
        if bias:
            self._bias.add(number, np.array(list(bias)), np.array(list(bias.values()), dtype=np.float64))
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.array(row.tokens, dtype=np.int64))
            self._repetition.add(number, seen, np.full(len(seen), params.repetition_penalty))
        if params.presence_penalty or params.frequency_penalty:
            output = np.array(row.tokens[row.num_prompt :], dtype=np.int64)
            ids, counts = np.unique(output, return_counts=True)
            amounts = params.presence_penalty + params.frequency_penalty * counts
            self._frequency.add(number, ids, amounts)
        if row.forbidden:
            self._forbidden.add(number, np.array(row.forbidden), np.full(len(row.forbidden), -np.inf))
        if (mask := row.whole_mask) is not None:
            self._masks[number] = mask

    def changes(self, convert: Callable[[NDArray[Any]], T]) -> Changes[T]:
        """The changes for `apply`, each array converted by `convert`, e.g. to a tensor of the device."""
        kinds = (self._bias, self._repetition, self._frequency, self._forbidden)
        arrays = [kind.arrays() if kind.rows else None for kind in kinds]
        masks = (np.array(list(self._masks)), np.stack(list(self._masks.values()))) if self._masks else None
        return [None if some is None else tuple(map(convert, some)) for some in (*arrays, masks)]


def adjustments_of(rows: Sequence[Row], vocab: int) -> tuple[Adjustments, dict[int, EngineRequestError]]:
    """The rows' changes of logits, and by number the rows that fail because their parameters cannot be applied."""
    adjustments, failed = Adjustments(vocab), dict[int, EngineRequestError]()
    for i, row in enumerate(rows):
        try:
            adjustments.add(i, row)
        except Exception as error:
            failed[i] = engine_request_error(error)
    return adjustments, failed


def apply(logits: Tensor, changes: Changes[Tensor]) -> None:
    """Change `logits`, fp32 [rows, vocab], in place: bias, repetition, presence and frequency, forbidden, masks."""
    bias, repetition, frequency, forbidden, masks = changes
    if bias is not None:
        rows, ids, amounts = bias
        logits.index_put_((rows, ids), amounts.to(logits.dtype), accumulate=True)
    if repetition is not None:
        rows, ids, penalties = repetition
        seen, penalty = logits[rows, ids], penalties.to(logits.dtype)
        scaled = torch.where(seen > 0, seen / penalty, seen * penalty)
        scaled = scaled.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
        logits.index_put_((rows, ids), torch.where(seen.isfinite(), scaled, seen))
    if frequency is not None:
        rows, ids, amounts = frequency
        logits.index_put_((rows, ids), logits[rows, ids] - amounts.to(logits.dtype))
    if forbidden is not None:
        rows, ids, never = forbidden
        logits.index_put_((rows, ids), never.to(logits.dtype))
    if masks is not None:
        rows, words = masks
        _apply_masks(logits, rows, words)


def _apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Add -inf where the bits of `words`, int64 [rows, words], are 0. It is added and not written, so that a row with
    NaN keeps it, and fails."""
    octets = words.view(torch.uint8).flatten().int()  # little-endian, as the words' bits
    added = _added_by_octet(logits.device).index_select(0, octets).view(len(rows), -1)
    logits.index_add_(0, rows, added[:, : logits.shape[1]])


@lru_cache
def _added_by_octet(device: torch.device) -> Tensor:
    """fp32 [256, 8]: -inf for each bit of an octet that is not set, the lowest one first."""
    octets, bits = torch.arange(256)[:, None], torch.arange(8)
    return torch.where(octets >> bits & 1 == 1, 0.0, float("-inf")).to(device)
