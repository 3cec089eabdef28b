"""Draws the next tokens from a step's logits in two halves: the draw is enqueued after the forward pass, the host reads
its results later. A failure in one row ends that row's request only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cluster.errors import EngineRequestError, engine_request_error
from engine.compiled_grammar import Words
from engine.grammar_masks import GrammarMasks
from engine.request import FinishReason, SamplingParams, TokenOutput
from engine.sampling.base import Sampler, is_sound
from engine.sampling.masks import allows_only, mask_of
from engine.sampling.row import Row
from engine.sampling.sampler import Sampled
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


class PendingTokens:
    """The draws of a step, from their begin on. An entry is one of `draws`, named by its index there."""

    def __init__(
        self,
        draws: Seq[Draws],
        logits: Tensor,
        limits: StopLimits,
        sampler: Sampler,
        masks: GrammarMasks | None = None,
    ):
        """`logits` is [rows, vocab]; without `masks` no sequence has a grammar."""
        self.draws = draws
        self._limits = limits
        self._positions = [len(draw.sequence.tokens) for draw in draws]
        self._failed: dict[int, EngineRequestError] = {}
        self._unsound: set[int] = set()
        self._rows: list[Row] = []
        self._first: list[int] = []  # of each entry: its first row
        source: list[int] = []
        for index, draw in enumerate(draws):
            self._first.append(len(self._rows))
            try:
                mask = masks.of(draw.sequence) if masks is not None else None
                own = _rows(draw, limits, mask, logits.shape[1])
            except Exception as error:
                self._failed[index] = engine_request_error(error)
                if not is_sound(logits[draw.logits_row]):
                    self._unsound.add(index)
                continue
            self._rows += own
            source += [draw.logits_row] * len(own)
        self._results: list[Drawn] | None = None
        # Without rows too: the host waits for its results, also after a step that computes only a part of a prompt.
        self._drawn = sampler.begin(logits, source, self._rows)

    @property
    def all_begun(self) -> bool:
        """Whether `token_ids` has a row of every entry."""
        return bool(self._rows) and not self._failed

    @property
    def token_ids(self) -> Tensor:
        """int64 [rows] on the device: all choices of the entries that did not fail before the draw, in order."""
        return self._drawn.token_ids

    def results(self) -> list[Drawn]:
        """The tokens of each entry, or the error that ends its request. Waits for the device: the step has ended then."""
        if self._results is None:
            sampled = self._drawn.results()
            self._results = [self._tokens(index, sampled) for index in range(len(self.draws))]
        return self._results

    def _tokens(self, index: int, sampled: Seq[Sampled | EngineRequestError]) -> Drawn:
        if index in self._failed:
            return self._failed[index]
        sequence, position = self.draws[index].sequence, self._positions[index]
        try:
            return [
                _output(sequence, self._rows[row], position, sampled[row], self._limits)
                for row in self._rows_of(index)
            ]
        except Exception as error:
            return engine_request_error(error)

    def _rows_of(self, index: int) -> range:
        return range(self._first[index], self._first[index] + self.draws[index].choices)

    def redrawn(self, index: int) -> bool:
        """After `results`: whether the entry's token is not that of `token_ids`."""
        return not self._drawn.redrawn.isdisjoint(self._rows_of(index))

    def unsound(self, index: int) -> bool:
        """After `results`, for an entry that failed: whether its logits were without a finite maximum."""
        if index in self._failed:
            return index in self._unsound
        return not self._drawn.unsound.isdisjoint(self._rows_of(index))


def _rows(draws: Draws, limits: StopLimits, mask: Words | None, vocab: int) -> list[Row]:
    """`mask`: the grammar's."""
    sequence, params = draws.sequence, draws.sequence.request.sampling
    ends = limits.eos if mask is not None or not params.ignore_eos else ()
    banned = forbidden(len(sequence.tokens) - sequence.num_prompt, params, ends)
    words = params.word_endings.at(sequence.tokens, sequence.num_prompt) if params.bad_words else ()
    allowed = mask_of(params.allowed_tokens, vocab) if params.allowed_tokens else None
    if banned and mask is not None:
        left = mask if allowed is None else mask & allowed
        if allows_only(left, (*limits.eos, *words)):
            banned = ()  # nothing but the end of the grammar is left
    return [
        Row(
            params,
            sequence.choice + extra,
            sequence.tokens,
            sequence.num_prompt,
            (*banned, *words),
            mask,
            allowed,
        )
        for extra in range(draws.choices)
    ]


def _output(
    sequence: Sequence, row: Row, position: int, token: Sampled | EngineRequestError, limits: StopLimits
) -> TokenOutput:
    if isinstance(token, EngineRequestError):
        raise token
    output_count = position - sequence.num_prompt + 1
    if row.mask is not None and token.token_id in limits.eos:
        reason: FinishReason | None = FinishReason.STOP
    else:
        reason = finish_reason(
            token.token_id, output_count, position + 1, row.params, limits.eos, limits.max_len
        )
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
    """Ids that would end the choice before min_tokens, for the next token. `eos`: the end-of-sequence
    tokens that end it."""
    if output_count + 1 >= params.min_tokens:
        return ()
    return tuple({*eos, *params.stop_token_ids})
