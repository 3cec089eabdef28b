"""The definition of the next token, one at a time, in float64, against which the engine's sampler is tested. It shares no
code with the sampler.

The definition is the numbered order of operations in engine/sampling/sampler.py and the draw of the hand-off's design:
uniform(seed, choice, position) is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) of
the counter (position low, position high, choice, 0) under the key (seed low, seed high); its first two words, the first
one above, give 53 bits of a fraction. Among equal logits the lower token id comes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

GREEDY_BELOW, LOWEST_TEMPERATURE, LARGEST = 1e-5, 1e-2, 1e30
MULTIPLIERS, WEYL, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
WORD = 2**32


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: ten rounds of two 32-bit products with swapped halves; a Weyl sequence advances the key."""
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


def uniform(seed: int, choice: int, position: int) -> float:
    counter = (position % WORD, position // WORD, choice, 0)
    first, second, _, _ = philox(counter, (seed % WORD, seed // WORD))
    return ((first * WORD + second) >> 11) / 2**53


@dataclass(frozen=True)
class Distribution:
    """The distribution of a draw, in the order of the inverse CDF."""

    ids: Ids
    logits: Floats  # divided by the temperature
    mass: Floats  # sums to 1
    by_probability: bool  # else by token id


def adjusted(
    logits: Floats, params: SamplingParams, tokens: Sequence[int], num_prompt: int, banned: Sequence[int] = ()
) -> Floats:
    """Bias, penalties and bans. `tokens` is prompt + output."""
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
    return result


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW


def distribution(row: Floats, params: SamplingParams) -> Distribution:
    """The distribution over adjusted logits [vocab]: top-k, then min-p, then top-p on what is left."""
    scaled = row / max(params.temperature, LOWEST_TEMPERATURE)
    by_probability = params.top_k > 0 or params.min_p > 0 or params.top_p < 1
    ids = np.lexsort((np.arange(len(row)), -scaled)) if by_probability else np.arange(len(row))
    if params.top_k:
        ids = ids[: params.top_k]
    mass = np.exp(scaled[ids] - scaled[ids].max())
    if params.min_p:
        kept = mass >= params.min_p * mass.max()
        ids, mass = ids[kept], mass[kept]
    mass /= mass.sum()
    if params.top_p < 1:
        count, so_far = 0, 0.0
        while count == 0 or (count < len(ids) and so_far < params.top_p):
            so_far += mass[count]
            count += 1
        ids, mass = ids[:count], mass[:count] / mass[:count].sum()
    return Distribution(ids, scaled[ids], mass, by_probability)


def next_token(row: Floats, params: SamplingParams, choice: int, position: int) -> int:
    """The token drawn from adjusted logits [vocab]. `position` is the token's own, in prompt + output."""
    if is_greedy(params):
        return int(np.flatnonzero(row == row.max())[0])
    found, draw, so_far = distribution(row, params), uniform(params.seed, choice, position), 0.0
    for token, mass in zip(found.ids, found.mass, strict=True):
        so_far += mass
        if so_far > draw:
            return int(token)
    return int(found.ids[found.mass > 0][-1])
