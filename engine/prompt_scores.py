"""Log probabilities of a prompt's tokens, from the hidden states of a step.

A prompt may have many thousand rows and a vocabulary 200 000 entries, so logits are made for a range of rows at a time,
and only the token's own log probability, its rank and the largest ones are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.step_delta import StepDelta

RANGE_ENTRIES = 1 << 22  # logits at a time: 16 MiB, beside as much for their log probabilities


class Score(NamedTuple):
    """Of one token, given those before it."""

    logprob: float
    rank: int  # 1 = no token is more probable
    top: tuple[tuple[int, float], ...]  # the most probable tokens, in order


def score(decoder: Decoder, hidden: Tensor, tokens: Tensor, delta: StepDelta) -> list[list[Score]]:
    """The scores of each scored item of the step, in order. `hidden` is [tokens, hidden], `tokens` int64 [tokens].

    Every rank calls it: ranks make logits together."""
    firsts, counts = (delta.counts.cumsum() - delta.counts).tolist(), delta.counts.tolist()
    scores: list[list[Score]] = []
    for item, rows, alternatives, following in delta.scored.tolist():
        first = firsts[item]
        targets = tokens[first + 1 : first + rows + 1]
        if rows == counts[item]:  # the token after the last one is not of this step
            targets = torch.cat([targets[: rows - 1], targets.new_tensor([following])])
        scores.append(list(_item(decoder, hidden[first : first + rows], targets, alternatives)))
    return scores


def _item(decoder: Decoder, hidden: Tensor, targets: Tensor, alternatives: int) -> Iterator[Score]:
    at, rows = 0, 1  # of the first range: then the vocabulary's size is known
    while at < len(hidden):
        logits = decoder.logits(hidden[at : at + rows])
        yield from _rows(logits, targets[at : at + rows], alternatives)
        at += rows
        rows = max(1, RANGE_ENTRIES // logits.shape[1])


def _rows(logits: Tensor, targets: Tensor, alternatives: int) -> Iterator[Score]:
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs.gather(-1, targets[:, None])
    ranks = (logprobs > own).sum(-1).add(1).tolist()
    values, ids = logprobs.topk(min(alternatives, logits.shape[1]))
    for logprob, rank, row_ids, row_values in zip(
        own[:, 0].tolist(), ranks, ids.tolist(), values.tolist(), strict=True
    ):
        yield Score(logprob, rank, tuple(zip(row_ids, row_values, strict=True)))
