"""Draws the next tokens from a step's logits; a failure in one row ends that row's request only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.request import TokenOutput
from engine.sampling.sampler import Row, Sampled, sample
from engine.scheduler.sequence import Sequence
from engine.stop import finish_reason, forbidden


@dataclass(frozen=True)
class Wanted:
    """The draws from one row of logits: one, or at the end of the prompt one for each choice."""

    sequence: Sequence
    logits_row: int
    choices: int


@dataclass(frozen=True)
class Ends:
    """The model's limits that end a choice."""

    eos: tuple[int, ...]
    max_len: int


Answer = list[TokenOutput] | EngineRequestError


def next_tokens(wanted: Seq[Wanted], logits: Tensor, ends: Ends) -> list[Answer]:
    """Tokens for each entry of `wanted`, in its order, or the error that ends that request.

    `logits` is [rows, vocab], a row for each entry.
    """
    answers: list[Answer] = []
    rows: list[Row] = []
    source: list[int] = []
    for one in wanted:
        try:
            mine = _rows(one, ends)
            rows += mine
            source += [one.logits_row] * len(mine)
            answers.append([])
        except Exception as error:
            answers.append(engine_request_error(error))
    if not rows:
        return answers
    picked = iter(zip(rows, sample(logits[source], rows), strict=True))
    for index, one in enumerate(wanted):
        if not isinstance(answers[index], list):
            continue
        mine_picked = [next(picked) for _ in range(one.choices)]
        try:
            answers[index] = [_output(one.sequence, row, token, ends) for row, token in mine_picked]
        except Exception as error:
            answers[index] = engine_request_error(error)
    return answers


def is_sound(logits: Tensor) -> bool:
    """Has a row, as the model gave it, a finite maximum? If not, the keys and values that it was computed from are to
    blame: whoever found them in the cache would fail as well."""
    return bool(logits.max().isfinite())


def _rows(one: Wanted, ends: Ends) -> list[Row]:
    sequence, params = one.sequence, one.sequence.request.sampling
    banned = forbidden(len(sequence.tokens) - sequence.num_prompt, params, ends.eos)
    return [
        Row(params, sequence.choice + extra, sequence.tokens, sequence.num_prompt, banned)
        for extra in range(one.choices)
    ]


def _output(sequence: Sequence, row: Row, token: Sampled | EngineRequestError, ends: Ends) -> TokenOutput:
    if isinstance(token, EngineRequestError):
        raise token
    position = len(sequence.tokens)
    reason = finish_reason(
        token.token_id,
        position - sequence.num_prompt + 1,
        position + 1,
        row.params,
        ends.eos,
        ends.max_len,
    )
    return TokenOutput(
        sequence.request.request_id,
        row.choice,
        position,
        token.token_id,
        token.logprob,
        token.top,
        reason,
    )
