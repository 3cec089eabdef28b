"""Chooses the next token of every row.

Order of operations, each for all rows at once:
 1. log probabilities are taken from the raw logits (where asked for)
 2. logit_bias is added
 3. repetition penalty (prompt and output; its result is kept within ±1e30: a tiny penalty makes no infinity), then
    presence and frequency penalties (output)
 4. min_tokens: end-of-sequence and stop ids are forbidden until reached; bad_words: the last token of each that the
    output has begun
 5. the grammar's mask, and that of allowed_tokens: every other token is forbidden
 6. temperature below 1e-5: the largest logit, the lowest id among equals; done
 7. the temperature is at least 1e-2
 8. top-k, then min-p, then top-p on what is left; among equal logits lower ids go first
 9. the largest of logit / temperature + Gumbel noise of (seed, choice, position, token id), see engine/sampling/draw.py

A row fails alone: if its logits hold NaN or +inf, if every token is forbidden, or if its parameters cannot be applied.
-inf marks a token that the model excludes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.errors import DeadEndError, EngineRequestError, GrammarDeadEndError, engine_request_error
from engine.sampling.adjust import adjustments_of, apply
from engine.sampling.cuts import keep
from engine.sampling.draw import draw
from engine.sampling.philox import DrawKey
from engine.sampling.row import Row, drawn_rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


Result = Sampled | EngineRequestError


def sample(logits: Tensor, rows: Sequence[Row]) -> list[Result]:
    """One token per row, or the error of that row. `logits` is [rows, vocab] fp32 and stays as it is."""
    try:
        return _sample(logits, rows)
    except Exception as error:
        if len(rows) == 1:
            return [engine_request_error(error)]
        log.warning("a step's draw failed, each row is drawn alone", exc_info=error)
        return [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]


def _sample(logits: Tensor, rows: Sequence[Row]) -> list[Result]:
    adjustments, failed = adjustments_of(rows, logits.shape[1])
    asked = [i for i, row in enumerate(rows) if row.params.logprobs]
    logprobs = _logprobs(_rows(logits, asked)) if asked else None
    if adjustments:
        logits = logits.clone()
        apply(logits, adjustments.changes(lambda array: torch.from_numpy(array).to(logits.device)))
    best = logits.argmax(-1)  # NaN wins argmax: a row with one is found below
    scales = torch.tensor([row.scale for row in rows], dtype=logits.dtype, device=logits.device)
    finite = (logits.gather(-1, best[:, None])[:, 0] / scales).isfinite()
    chosen = torch.where(finite, _chosen(logits, rows, best), best)
    results: list[Result] = [Sampled(token) for token in chosen.tolist()]
    if logprobs is not None:
        top = [rows[i].params.top_logprobs for i in asked]
        for i, result in zip(asked, _with_logprobs(logprobs, chosen[asked], top), strict=True):
            results[i] = result
    for i in (~finite).nonzero()[:, 0].tolist():
        results[i] = no_maximum(bool((logits[i] == float("-inf")).all()), rows[i])
    for i, reason in failed.items():
        results[i] = reason
    return results


def _rows(logits: Tensor, numbers: list[int]) -> Tensor:
    return logits if len(numbers) == logits.shape[0] else logits[numbers]


def _chosen(logits: Tensor, rows: Sequence[Row], best: Tensor) -> Tensor:
    """Steps 6 to 9: int64 [rows]. `best` is each row's largest logit."""
    whole, cut = drawn_rows(rows)
    chosen = best.clone()
    if whole:
        chosen[whole] = draw(_rows(logits, whole), None, *_of(rows, whole))
    if cut:
        temperatures, keys = _of(rows, cut)
        for kept in keep(_rows(logits, cut), [rows[i].params for i in cut], temperatures):
            at = kept.rows.tolist()
            tokens = draw(kept.logits, kept.token_ids, [temperatures[i] for i in at], [keys[i] for i in at])
            chosen[[cut[i] for i in at]] = tokens
    return chosen


def _of(rows: Sequence[Row], numbers: list[int]) -> tuple[list[float], list[DrawKey]]:
    """Temperatures and keys of some rows."""
    return [rows[i].scale for i in numbers], [rows[i].key for i in numbers]


def not_finite() -> EngineRequestError:
    return EngineRequestError("the model's logits are not finite")


def no_maximum(excluded: bool, row: Row) -> EngineRequestError:
    """`excluded`: whether all of its logits, as adjusted, are -inf."""
    if row.mask is not None and excluded:
        return GrammarDeadEndError(
            "grammar: every token that it allows next is excluded by the other options, or has no probability",
            field="grammar",
        )
    if excluded and (row.allowed is not None or row.params.bad_words):
        field = "bad_words" if row.allowed is None else "allowed_token_ids"
        return DeadEndError(
            f"{field}: together with the other options it excludes every token, or those left have no probability",
            field=field,
        )
    if row.forbidden and excluded:
        return EngineRequestError(
            "min_tokens forbids every token: each ends the output or has no probability", field="min_tokens"
        )
    return not_finite()


def _logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1)


def _with_logprobs(logprobs: Tensor, chosen: Tensor, top: list[int]) -> list[Result]:
    """`logprobs` [rows, vocab] and `chosen` [rows] of the rows that ask for them, `top` of their largest for each."""
    own = logprobs.gather(-1, chosen[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(max(top), logprobs.shape[1]))
    results: list[Result] = []
    for token, logprob, count, row_ids, row_values in zip(
        chosen.tolist(), own, top, ids.tolist(), values.tolist(), strict=True
    ):
        if math.isfinite(logprob):
            largest = tuple(zip(row_ids[:count], row_values[:count], strict=True))
            results.append(Sampled(token, logprob, largest))
        else:
            results.append(not_finite())
    return results
