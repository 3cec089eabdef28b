"""Chooses the next token of every row.

Order of operations, per row:
 1. log probabilities are taken from the raw logits (where asked for)
 2. logit_bias is added
 3. repetition penalty (prompt and output; its result is kept within ±1e30: a tiny penalty makes no infinity), then
    presence and frequency penalties (output)
 4. min_tokens: end-of-sequence and stop ids are forbidden until reached
 5. temperature below 1e-5: the largest logit, the lowest id among equals; done
 6. logits / temperature, which is at least 1e-2
 7. top-k, then min-p, then top-p on what is left
 8. inverse CDF at uniform(seed, choice, position); by falling probability where 7 has sorted, else by token id

A row fails alone: if its logits hold NaN or +inf, if every token is forbidden, or if its parameters cannot be applied.
-inf marks a token that the model excludes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.request import SamplingParams
from engine.sampling.philox import uniform

GREEDY_BELOW = 1e-5  # temperatures
# Lower temperatures are raised to it: a difference of 1 between logits is a factor of e^100 already
LOWEST_TEMPERATURE = 1e-2
# Bound on logits after the repetition penalty: still finite when divided by the lowest temperature
LARGEST_LOGIT = 1e30


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


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled | EngineRequestError]:
    """Draw one token per row. `logits` is [rows, vocab] fp32 and may be changed in place.

    Returns for each row its token, or the error of that row.
    """
    raw: list[Tensor | None] = [None] * len(rows)
    failed: dict[int, EngineRequestError] = {}
    for i, row in enumerate(rows):
        try:
            raw[i] = _logprobs(logits[i]) if row.params.logprobs else None
            adjust(logits[i], row)
        except Exception as error:
            failed[i] = engine_request_error(error)
    best = logits.argmax(-1, keepdim=True)  # NaN wins argmax: a row with one is found below
    chosen: list[int] = best[:, 0].tolist()
    finite: list[bool] = logits.gather(-1, best)[:, 0].isfinite().tolist()
    random = [i for i, row in enumerate(rows) if row.params.temperature >= GREEDY_BELOW]
    draws = dict(zip(random, _uniform([rows[i] for i in random]), strict=True))
    results: list[Sampled | EngineRequestError] = []
    for i, row in enumerate(rows):
        try:
            if i in failed:
                raise failed[i]
            if not finite[i]:
                raise _no_maximum(logits[i], row)
            token = _draw(logits[i], row.params, draws[i]) if i in draws else chosen[i]
            results.append(_result(token, raw[i], row.params))
        except Exception as error:
            results.append(engine_request_error(error))
    return results


def _no_maximum(logits: Tensor, row: Row) -> EngineRequestError:
    """`logits` as adjusted."""
    if row.forbidden and bool((logits == float("-inf")).all()):
        return EngineRequestError(
            "min_tokens forbids every token: each ends the output or has no probability", field="min_tokens"
        )
    return EngineRequestError("the model's logits are not finite")


def _uniform(rows: Sequence[Row]) -> list[float]:
    if not rows:
        return []
    draws: list[float] = uniform(
        [row.params.seed for row in rows], [row.choice for row in rows], [len(row.tokens) for row in rows]
    ).tolist()
    return draws


def _logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def _result(token: int, raw: Tensor | None, params: SamplingParams) -> Sampled:
    if raw is None:
        return Sampled(token)
    top: tuple[tuple[int, float], ...] = ()
    if params.top_logprobs:
        values, ids = raw.topk(min(params.top_logprobs, raw.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    own = float(raw[token])
    if not math.isfinite(own):
        raise EngineRequestError("the model's logits are not finite")
    return Sampled(token, own, top)


def adjust(logits: Tensor, row: Row) -> None:
    """Steps 2 to 4, in place."""
    params = row.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        seen = logits[ids]
        scaled = torch.where(
            seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
        ).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
        logits[ids] = torch.where(seen.isfinite(), scaled, seen)
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

    Sorted candidates are enough where they hold all that min-p keeps, or the mass that top-p asks for; else all are
    sorted.
    """
    scaled = logits / max(params.temperature, LOWEST_TEMPERATURE)
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
        least = params.min_p * mass[0]
        cut_short = bool(mass[-1] >= least) if params.min_p else float(mass.sum()) < params.top_p
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
    """The first index whose cumulative mass exceeds draw · total; `mass` need not be normalised.

    Raises EngineRequestError if the total is 0 or not finite: logits that overflow when divided by the temperature.
    """
    cumulated = mass.cumsum(-1)
    total = float(cumulated[-1])
    if not (0.0 < total < math.inf):
        raise EngineRequestError("the logits give no distribution to draw from")
    index = int(torch.searchsorted(cumulated, draw * total, right=True))
    return min(index, int(mass.nonzero()[-1]))
