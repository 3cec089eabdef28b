"""Draws the next tokens from a step's logits; a failure in one row ends that row's request only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.request import FinishReason, SamplingParams, TokenOutput
from engine.sampling.adjust import Row
from engine.sampling.sampler import Sampled, sample
from engine.scheduler.sequence import Sequence


class Draws(NamedTuple):
    """The draws from one row of logits: one, or at the end of the prompt one for each choice."""

    sequence: Sequence
    logits_row: int
    choices: int


@dataclass(frozen=True)
class StopLimits:
    """The model's limits that end a choice."""

    eos: tuple[int, ...]
    max_len: int


Drawn = list[TokenOutput] | EngineRequestError


def next_tokens(draws: Seq[Draws], logits: Tensor, limits: StopLimits) -> list[Drawn]:
    """Tokens for each entry of `draws`, in its order, or the error that ends that request.

    `logits` is [rows, vocab].
    """
    results: list[Drawn] = []
    rows: list[Row] = []
    source: list[int] = []
    for draw in draws:
        try:
            own = _rows(draw, limits)
            rows += own
            source += [draw.logits_row] * len(own)
            results.append([])
        except Exception as error:
            results.append(engine_request_error(error))
    if not rows:
        return results
    sampled = iter(zip(rows, sample(logits[source], rows), strict=True))
    for index, draw in enumerate(draws):
        if not isinstance(results[index], list):
            continue
        own_sampled = [next(sampled) for _ in range(draw.choices)]
        try:
            results[index] = [_output(draw.sequence, row, token, limits) for row, token in own_sampled]
        except Exception as error:
            results[index] = engine_request_error(error)
    return results


def is_sound(logits: Tensor) -> bool:
    """Whether a row, as the model gave it, has a finite maximum. If not, the KV that it was computed from is wrong, and
    every request that found it in the prefix cache would fail as well."""
    return bool(logits.max().isfinite())


def _rows(draws: Draws, limits: StopLimits) -> list[Row]:
    sequence, params = draws.sequence, draws.sequence.request.sampling
    banned = forbidden(len(sequence.tokens) - sequence.num_prompt, params, limits.eos)
    return [
        Row(params, sequence.choice + extra, sequence.tokens, sequence.num_prompt, banned)
        for extra in range(draws.choices)
    ]


def _output(
    sequence: Sequence, row: Row, token: Sampled | EngineRequestError, limits: StopLimits
) -> TokenOutput:
    if isinstance(token, EngineRequestError):
        raise token
    position = len(sequence.tokens)
    output_count = position - sequence.num_prompt + 1
    reason = finish_reason(token.token_id, output_count, position + 1, row.params, limits.eos, limits.max_len)
    return TokenOutput(
        sequence.request.request_id, row.choice, position, token.token_id, token.logprob, token.top, reason
    )


def finish_reason(
    token: int, output_count: int, total: int, params: SamplingParams, eos: tuple[int, ...], max_len: int
) -> FinishReason | None:
    """The end of a choice that its token ids decide; the router applies stop strings. `output_count` and `total` include
    `token`."""
    ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
    if ends and output_count >= params.min_tokens:
        return FinishReason.STOP
    if output_count >= params.max_tokens or total >= max_len:
        return FinishReason.LENGTH
    return None


def forbidden(output_count: int, params: SamplingParams, eos: tuple[int, ...]) -> tuple[int, ...]:
    """Ids that would end the choice before min_tokens, for the next token."""
    if output_count + 1 >= params.min_tokens:
        return ()
    ends = () if params.ignore_eos else eos
    return tuple({*ends, *params.stop_token_ids})
