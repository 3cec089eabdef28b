"""The definition of the next token, one at a time, in float64, against which the engine's sampler is tested. It shares no
code with the sampler.

The definition is the numbered order of operations in engine/sampling/sampler.py. Of the tokens that the cuts keep, the one
with the largest logit / temperature + noise is drawn, the lower id among equals. The noise of a token is -log(-log u),
u = (word + 1/2) / 2^32, and word is number (token id mod 4) of Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC11) of the counter (position low, position high, choice, token id div 4) under the key (seed low, seed
high). Among equal logits the cuts take the lower token id first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Word = Any  # an integer, or a column of uint64

GREEDY_BELOW, LOWEST_TEMPERATURE, LARGEST = float(np.float32(1e-5)), 1e-2, 1e30
MULTIPLIERS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
WORD = 2**32


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: ten rounds of two 32-bit products with swapped halves; a Weyl sequence advances the key. Works on
    integers and on columns of uint64."""
    one, two, three, four = counter
    for turn in range(ROUNDS):
        left, right = ((key[i] + turn * WEYL[i]) % WORD for i in (0, 1))
        first, second = MULTIPLIERS[0] * one, MULTIPLIERS[1] * three
        one, two, three, four = (
            second // WORD ^ two ^ left,
            second % WORD,
            first // WORD ^ four ^ right,
            first % WORD,
        )
    return one, two, three, four


def noise(vocab: int, seed: int, choice: int, position: int) -> Floats:
    """The noise of every token."""
    fours = np.arange((vocab + 3) // 4, dtype=np.uint64)
    counter = (fours * 0 + position % WORD, fours * 0 + position // WORD, fours * 0 + choice, fours)
    words = np.stack(philox(counter, (seed % WORD, seed // WORD)), -1).reshape(-1)[:vocab]
    return np.asarray(-np.log(-np.log((words.astype(np.float64) + 0.5) / WORD)))


def adjusted(
    logits: Floats, params: SamplingParams, tokens: Sequence[int], num_prompt: int, banned: Sequence[int] = ()
) -> Floats:
    """Bias, penalties, bans and exclusions. `tokens` is prompt + output."""
    result = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        result[token] += bias
    if params.repetition_penalty != 1.0:
        for token in set(tokens):
            if np.isfinite(result[token]):
                factor = params.repetition_penalty
                new = result[token] / factor if result[token] > 0 else result[token] * factor
                result[token] = min(max(new, -LARGEST), LARGEST)
    for token, count in Counter(tokens[num_prompt:]).items():
        result[token] -= params.presence_penalty + count * params.frequency_penalty
    result[list(banned)] = -np.inf
    _exclude(result, params, list(tokens[num_prompt:]))
    return result


def _exclude(row: Floats, params: SamplingParams, output: list[int]) -> None:
    """By a word that the output has begun, and by the list of allowed tokens."""
    for *beginning, last in params.bad_words:
        if len(beginning) <= len(output) and beginning == output[len(output) - len(beginning) :]:
            row[last] = -np.inf
    for token in range(len(row)) if params.allowed_tokens else ():
        byte = token // 8
        if byte >= len(params.allowed_tokens) or not params.allowed_tokens[byte] >> token % 8 & 1:
            row[token] = -np.inf


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def kept(row: Floats, params: SamplingParams) -> Ids:
    """Ids that top-k, then min-p, then top-p keep of adjusted logits [vocab], by falling logit; where none of them is
    asked for, all."""
    scaled = scaled_logits(row, params)
    ids = np.lexsort((np.arange(len(row)), -scaled))
    if params.top_k:
        ids = ids[: params.top_k]
    mass = np.exp(scaled[ids] - scaled[ids].max())
    if params.min_p:
        enough = mass >= params.min_p * mass.max()
        ids, mass = ids[enough], mass[enough]
    if params.top_p < 1:
        mass /= mass.sum()
        count, so_far = 0, 0.0
        while count == 0 or (count < len(ids) and so_far < params.top_p):
            so_far += mass[count]
            count += 1
        ids = ids[:count]
    return ids


def scaled_logits(row: Floats, params: SamplingParams) -> Floats:
    return row / max(params.temperature, LOWEST_TEMPERATURE)


def sums(row: Floats, params: SamplingParams, choice: int, position: int) -> Floats:
    """Logit / temperature + noise of every token, whether it is kept or not. `row` holds adjusted logits; `position` is
    the drawn token's own, in prompt + output."""
    return scaled_logits(row, params) + noise(len(row), params.seed, choice, position)


def next_token(row: Floats, params: SamplingParams, choice: int, position: int) -> int:
    """The token drawn from adjusted logits [vocab]."""
    if is_greedy(params):
        return int(np.flatnonzero(row == row.max())[0])
    ids = np.sort(kept(row, params))
    values = sums(row, params, choice, position)[ids]
    return int(ids[np.flatnonzero(values == values.max())[0]])
