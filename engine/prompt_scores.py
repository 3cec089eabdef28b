"""Log probabilities of a prompt's tokens, from the hidden states of a step.

A prompt may have many thousand rows and a vocabulary 200 000 entries, so logits are made for a range of rows at a time,
and only the token's own log probability, its rank and the largest ones are kept, packed: as Python objects those of
2 000 tokens with 20 alternatives would take 0.1 s under the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.model.decoder import Decoder
from engine.step_delta import StepDelta

RANGE_ENTRIES = 1 << 22  # logits at a time: 16 MiB, beside as much for their log probabilities


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of consecutive tokens, each given those before it. Column 0 is the token itself, the others are the most
    probable tokens in order."""

    ranks: npt.NDArray[np.uint32]  # [tokens]: place by log probability; 1 = no token is more probable
    token_ids: npt.NDArray[np.uint32]  # [tokens, 1 + alternatives]
    logprobs: npt.NDArray[np.float32]  # [tokens, 1 + alternatives]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def finite(self) -> bool:
        """Whether the log probability of each token is a number."""
        return bool(np.isfinite(self.logprobs[:, 0]).all())

    def part(self, begin: int, end: int | None = None) -> Scores:
        """The scores of the tokens from `begin` to `end`, without a copy."""
        return Scores(self.ranks[begin:end], self.token_ids[begin:end], self.logprobs[begin:end])


def score(decoder: Decoder, hidden: Tensor, tokens: Tensor, delta: StepDelta) -> list[Scores]:
    """The scores of each scored item of the step, in order. `hidden` is [tokens, hidden], `tokens` int64 [tokens].

    Every rank calls it: ranks make logits together."""
    firsts, counts = (delta.counts.cumsum() - delta.counts).tolist(), delta.counts.tolist()
    scores: list[Scores] = []
    for item, rows, alternatives, following in delta.scored.tolist():
        first = firsts[item]
        targets = tokens[first + 1 : first + rows + 1]
        if rows == counts[item]:  # the token after the last one is not of this step
            targets = torch.cat([targets[: rows - 1], targets.new_tensor([following])])
        scores.append(_joined(list(_item(decoder, hidden[first : first + rows], targets, alternatives))))
    return scores


def _item(decoder: Decoder, hidden: Tensor, targets: Tensor, alternatives: int) -> Iterator[Scores]:
    at, rows = 0, 1  # of the first range: then the vocabulary's size is known
    while at < len(hidden):
        logits = decoder.logits(hidden[at : at + rows])
        yield _range(logits, targets[at : at + rows], alternatives)
        at += rows
        rows = max(1, RANGE_ENTRIES // logits.shape[1])


def _range(logits: Tensor, targets: Tensor, alternatives: int) -> Scores:
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs.gather(-1, targets[:, None])
    ranks = (logprobs > own).sum(-1).add(1)
    values, ids = logprobs.topk(min(alternatives, logits.shape[1]))
    return Scores(
        ranks.cpu().numpy().astype(np.uint32),
        torch.cat([targets[:, None], ids], 1).cpu().numpy().astype(np.uint32),
        torch.cat([own, values], 1).float().cpu().numpy(),
    )


def _joined(ranges: Sequence[Scores]) -> Scores:
    return Scores(
        np.concatenate([one.ranks for one in ranges]),
        np.concatenate([one.token_ids for one in ranges]),
        np.concatenate([one.logprobs for one in ranges]),
    )
