"""Chooses the next token of every row.

Order of operations, per row:
 1. log probabilities are taken from the raw logits (where asked for)
 2. logit_bias is added
 3. repetition penalty (prompt and output), then presence and frequency penalties (output)
 4. min_tokens: end-of-sequence and stop ids are forbidden until reached
 5. temperature 0: the largest logit, the lowest id among equals; done
 6. logits / temperature
 7. top-k, then min-p, then top-p on what is left
 8. inverse CDF at uniform(seed, choice, position); by falling probability where 7 has sorted, else by token id
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling.philox import uniform


@dataclass(frozen=True)
class Row:
    """What one sequence's draw depends on. `tokens` is prompt + output, `num_prompt` splits them."""

    params: SamplingParams
    choice: int
    tokens: Sequence[int]
    num_prompt: int
    forbidden: tuple[int, ...]  # ids that min_tokens forbids now


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """logits [rows, vocab] fp32; may be changed in place."""
    raw = [_logprobs(logits[i]) if row.params.logprobs else None for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        adjust(logits[i], row)
    chosen: list[int] = logits.argmax(-1).tolist()
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        draws = uniform(
            [rows[i].params.seed for i in random],
            [rows[i].choice for i in random],
            [len(rows[i].tokens) for i in random],
        )
        for i, draw in zip(random, draws, strict=True):
            chosen[i] = _draw(logits[i], rows[i].params, float(draw))
    return [_result(token, raw[i], rows[i].params) for i, token in enumerate(chosen)]


def _logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def _result(token: int, raw: Tensor | None, params: SamplingParams) -> Sampled:
    if raw is None:
        return Sampled(token)
    top: tuple[tuple[int, float], ...] = ()
    if params.top_logprobs:
        values, ids = raw.topk(min(params.top_logprobs, raw.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Sampled(token, float(raw[token]), top)


def adjust(logits: Tensor, row: Row) -> None:
    """Steps 2 to 4, in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        seen = logits[ids]
        logits[ids] = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        output = torch.tensor(row.tokens[row.num_prompt :], dtype=torch.int64, device=logits.device)
        if output.numel():
            ids, counts = torch.unique(output, return_counts=True)
            logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if row.forbidden:
        logits[torch.tensor(row.forbidden, device=logits.device)] = float("-inf")


_PREFILTER = 256


def _draw(logits: Tensor, params: SamplingParams, draw: float) -> int:
    ids, mass = candidates(logits, params)
    return int(ids[_invert(mass, draw)])


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What a draw chooses from: token ids in the order of the CDF, and their mass (not normalised).

    Sorted candidates are enough where they hold the mass that top-p asks for; else all are sorted.
    """
    scaled = logits / params.temperature
    vocab = scaled.shape[0]
    if params.top_k == 0 and params.top_p >= 1.0 and params.min_p == 0.0:
        return torch.arange(vocab, device=logits.device), torch.softmax(scaled, -1).double()
    count = min(vocab, params.top_k or _PREFILTER)
    values, ids = scaled.topk(count)
    if params.top_k:
        mass = torch.softmax(values.double(), -1)
    else:
        mass = (values.double() - torch.logsumexp(scaled.double(), -1)).exp()
        # Where min-p keeps the last candidate it may keep others behind it, and top-p is a share of all it keeps.
        cut_short = params.top_p >= 1.0 or float(mass.sum()) < params.top_p
        cut_short = cut_short or (params.min_p > 0 and bool(mass[-1] >= params.min_p * mass[0]))
        if count < vocab and cut_short:
            values, ids = scaled.sort(descending=True, stable=True)
            mass = torch.softmax(values.double(), -1)
    if params.min_p:
        mass = torch.where(mass >= params.min_p * mass[0], mass, 0.0)
    if params.top_p < 1.0:
        total = mass.sum() if params.top_k or params.min_p else 1.0
        before = mass.cumsum(-1) - mass
        mass = torch.where(before < params.top_p * total, mass, 0.0)
    return ids, mass


def _invert(mass: Tensor, draw: float) -> int:
    """The first index whose cumulated mass exceeds draw · total. `mass` needs no normalising."""
    cumulated = mass.cumsum(-1)
    index = int(torch.searchsorted(cumulated, draw * cumulated[-1], right=True))
    return min(index, int(mass.nonzero()[-1]))
