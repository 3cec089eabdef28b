"""Input of one sequence's draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.compiled_grammar import Words
from engine.request import SamplingParams
from engine.sampling.cuts import has_cuts
from engine.sampling.philox import DrawKey

# Temperatures: 1e-5 as a float of 32 bits, which requests have on their way to workers. It is a little less, and is drawn.
GREEDY_BELOW = float(np.float32(1e-5))
# Lower temperatures are raised to it: a difference of 1 between logits is a factor of e^100 already
LOWEST_TEMPERATURE = 1e-2


@dataclass(frozen=True)
class Row:
    """`tokens` is prompt + output, `num_prompt` splits them."""

    params: SamplingParams
    choice: int
    tokens: Sequence[int]
    num_prompt: int
    forbidden: tuple[int, ...]  # ids that min_tokens and bad_words forbid now
    mask: Words | None = None  # a bit for each token that the grammar allows now
    allowed: Words | None = None  # the same of allowed_tokens

    @property
    def whole_mask(self) -> Words | None:
        """What `mask` and `allowed` leave; None: every token."""
        if self.mask is None or self.allowed is None:
            return self.allowed if self.mask is None else self.mask
        return self.mask & self.allowed

    @property
    def key(self) -> DrawKey:
        return DrawKey(self.params.seed, self.choice, len(self.tokens))

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the largest logit, without a draw."""
        return self.params.temperature < GREEDY_BELOW

    @property
    def scale(self) -> float:
        """The temperature by which logits are divided; 1 for greedy rows."""
        return 1.0 if self.is_greedy else max(self.params.temperature, LOWEST_TEMPERATURE)


def drawn_rows(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """The rows that are drawn from all tokens, and those that are drawn from what top-k, top-p and min-p keep."""
    whole: list[int] = []
    cut: list[int] = []
    for i, row in enumerate(rows):
        if not row.is_greedy:
            (cut if has_cuts(row.params) else whole).append(i)
    return whole, cut
