"""Mixtures of experts: which experts a token takes, and rows in the order of their experts. By torch, for any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

_TINY = 1e-20  # in a denominator, as in Hugging Face's code


@dataclass(frozen=True)
class Routing:
    """How a token's experts and their weights follow from the router's logits, in Hugging Face's dtypes and order of
    operations: another one would now and then choose another expert."""

    per_token: int
    scores: Literal["softmax", "sigmoid", "softmax of chosen"]
    normed: bool  # the weights of a token add up to 1
    rounded: bool  # weights have the dtype of the logits
    correction: Tensor | None = None  # fp32 [experts], added to sigmoid scores for the choice only
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, experts] → weights and experts' numbers, [tokens, per_token] each, the best expert first."""
        if self.scores == "softmax of chosen":
            best, chosen = torch.topk(logits, self.per_token)
            return torch.softmax(best, -1), chosen
        return self._by_softmax(logits) if self.scores == "softmax" else self._by_sigmoid(logits)

    def _by_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), self.per_token)
        if self.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights.to(logits.dtype) if self.rounded else weights), chosen

    def _by_sigmoid(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = sigmoid(logits)
        judged = scores if self.correction is None else scores + self.correction
        chosen = torch.topk(self._of_best_groups(judged), self.per_token).indices
        weights = scores.gather(1, chosen)
        if self.normed:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        return weights * self.scale, chosen

    def _of_best_groups(self, judged: Tensor) -> Tensor:
        """Scores of experts of other groups than the best ones become -inf. A group is as good as its two best experts."""
        if self.groups == self.kept_groups:
            return judged
        grouped = judged.view(len(judged), self.groups, -1)
        best = torch.topk(grouped.topk(2).values.sum(-1), self.kept_groups).indices
        others = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(others[..., None], -torch.inf).view_as(judged)


@dataclass(frozen=True)
class Sorted:
    """Pairs of a token and one of its experts, in the order of the experts; pairs of experts that are not held come last.

    `pairs`: of each, its index in [tokens · per_token]. `counts`: of each held expert, its pairs.
    """

    pairs: Tensor
    counts: Tensor

    @classmethod
    def of(cls, chosen: Tensor, held: range) -> Sorted:
        """`chosen`: experts' numbers [tokens, per_token]; `held`: those whose weights this rank has."""
        experts = chosen.flatten()
        if held.start:
            experts = experts - held.start
            experts = torch.where(experts < 0, len(held), experts)
        # Stable: pairs of one expert stay in the order of their tokens.
        found, pairs = torch.sort(experts, stable=True)
        borders = torch.arange(len(held) + 1, device=found.device)
        counts = torch.searchsorted(found, borders).diff()
        return cls(pairs, counts)

    @cached_property
    def groups(self) -> list[tuple[int, int, int]]:
        """(expert, first pair, pair after the last) of each held expert that has any; waits for the device."""
        found, begin = [], 0
        for expert, count in enumerate(self.counts.tolist()):
            if count:
                found.append((expert, begin, begin + count))
                begin += count
        return found

    def experts(self) -> Tensor:
        """[pairs]: the index of each pair's expert among those held; for an expert that is not held, the last index."""
        at = torch.arange(len(self.pairs), device=self.pairs.device)
        return torch.searchsorted(self.counts.cumsum(0), at, right=True).clamp_(max=len(self.counts) - 1)

    def own_pairs(self) -> Tensor:
        """The pairs of held experts; waits for the device."""
        return self.pairs[: self.groups[-1][2] if self.groups else 0]

    def is_own(self) -> Tensor:
        """Whether its expert is held, for each pair."""
        return torch.arange(len(self.pairs), device=self.pairs.device) < self.counts.sum()


class OneToken:
    """The experts of one token, in the order of their weights.

    `own`: of those that are held, their places among the token's. `groups`: as of `Sorted`, of a row each.
    """

    def __init__(self, chosen: Sequence[int], held: range):
        self.own = [place for place, expert in enumerate(chosen) if expert in held]
        self.groups = [(chosen[place] - held.start, at, at + 1) for at, place in enumerate(self.own)]


def sigmoid(x: Tensor) -> Tensor:
    """In double precision: torch's vector and scalar forms differ in the last bit, and which of them computes an element
    depends on how many are beside it."""
    return x.double().sigmoid().to(x.dtype)


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """[tokens · per_token, width], in the order of the tokens, and weights [tokens, per_token] → [tokens, width].

    A token's experts are added in the order of their weights, whatever tokens are beside it.
    """
    tokens, per_token = weights.shape
    return (rows.view(tokens, per_token, -1) * weights[..., None]).sum(1).to(rows.dtype)
