"""Turns a step's logits into tokens: progress of sequences, sampling, new choices, ends, failures of single requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from cluster.errors import DeadEndError, EngineRequestError, engine_request_error
from cluster.protocol.pooling import Pooling
from engine.flight import Flight
from engine.grammar_masks import GrammarMasks
from engine.next_tokens import Draws, PendingTokens, StopLimits
from engine.plan import StepPlan
from engine.pooling import joined, vector
from engine.request import (
    EngineStats,
    PromptChunk,
    PromptEmbedding,
    PromptOutput,
    RequestDone,
    StepOutput,
    TokenOutput,
)
from engine.sampling.base import Sampler
from engine.sampling.sampler import not_finite
from engine.scheduler.decision import StepDecision
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.speculation.drafts import Drafter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSpan:
    """Begin and end of a forward pass (monotonic seconds), and the tokens of all its sequences."""

    began: float
    ended: float
    tokens: int


class OutputProcessor:
    def __init__(
        self,
        scheduler: Scheduler,
        prefixes: PrefixCache,
        limits: StopLimits,
        counters: EngineStats,
        sampler: Sampler,
        drafter: Drafter,
        masks: GrammarMasks,
    ):
        self._masks = masks
        self._drafter = drafter
        self._sampler = sampler
        self._scheduler = scheduler
        self._prefixes = prefixes
        self._limits = limits
        self._counters = counters

    def begin(self, decision: StepDecision, plan: StepPlan, logits: Tensor) -> PendingTokens:
        """Begin to draw. `logits` is [tokens of `plan` that want them, vocab]."""
        sampled = [s for s, item in decision.own_items(plan) if item.num_logits]
        draws = [Draws(s, row, self._new_choices(s)) for row, s in enumerate(sampled)]
        return self._pending(draws, logits)

    def _pending(self, draws: list[Draws], logits: Tensor) -> PendingTokens:
        masks = self._masks if self._masks.active else None
        return PendingTokens(draws, logits, self._limits, self._sampler, masks)

    def finish(self, flight: Flight, span: StepSpan) -> None:
        """Add the step's tokens and ends to its output."""
        output, pending = flight.output, flight.pending
        if flight.scores:
            self._report_prompts(flight)
        if flight.pooled:
            self._pool_prompts(flight)
        for sequence, count in flight.decision.scheduled.items():
            if not flight.keeps(sequence):  # it has left, or another choice of its request has failed
                continue
            self._computed(sequence, 0 if flight.followed else count, span, output)
        self._take(pending, flight)
        if flight.decision.drafts:
            self._verify(flight, span)

    def _report_prompts(self, flight: Flight) -> None:
        """Add the step's scored tokens of prompts to its output: each once, also where a preempted prompt is computed
        again."""
        scored = [(s, item) for s, item in flight.decision.own_items(flight.plan) if item.scored]
        for (sequence, item), scores in zip(scored, flight.scores, strict=True):
            if not flight.keeps(sequence):
                continue
            try:
                done = sequence.next_scored - item.begin - 1  # reported before a preemption
                new = scores.part(max(0, done))
                if not new.finite:
                    raise not_finite()
                if len(new):
                    request_id = sequence.request.request_id
                    flight.output.prompts.append(PromptOutput(request_id, sequence.next_scored, new))
                    sequence.next_scored += len(new)
            except EngineRequestError as error:
                self._unsound(sequence, error, flight.output)

    def _pool_prompts(self, flight: Flight) -> None:
        """Pool the step's chunks of prompts. The embeddings of those that are complete precede their first tokens."""
        pooled = [(s, item) for s, item in flight.decision.own_items(flight.plan) if item.pooled]
        for (sequence, item), part in zip(pooled, flight.pooled, strict=True):
            if not flight.keeps(sequence):
                continue
            sequence.pooled = whole = joined(item.pooling, sequence.pooled, part)
            if item.begin + item.pooled < sequence.num_prompt:
                continue
            try:
                flight.output.prompts.append(embedding(sequence, item.pooling, whole))
            except EngineRequestError as error:
                self._unsound(sequence, error, flight.output)

    def _verify(self, flight: Flight, span: StepSpan) -> None:
        """Accept drafts up to the first that differs from the token drawn at its position.

        Each draw is that of a step of its own, and its row is computed from the same tokens: so penalties, stops and
        random numbers are those without drafts."""
        drafts, first = flight.decision.drafts, len(flight.pending.draws)
        rows = dict[Sequence, int]()  # the row of the logits of each sequence's first draft
        for sequence, tokens in drafts.items():
            rows[sequence], first = first, first + len(tokens)
        accepted = dict.fromkeys(drafts, 0)
        live = list(drafts)
        while live := self._with_masks(
            [s for s in live if self._accepts_draft(flight, s, drafts[s], accepted[s])]
        ):
            for sequence in live:
                if flight.keeps(sequence):  # else another choice of its request has failed
                    self._computed(sequence, 1, span, flight.output)
            draws = [Draws(s, rows[s] + accepted[s], 1) for s in live if flight.keeps(s)]
            for sequence in live:
                accepted[sequence] += 1
            self._take(self._pending(draws, flight.logits), flight)
        for sequence, tokens in drafts.items():
            self._counters.draft_steps += 1
            self._counters.draft_tokens += len(tokens)
            self._counters.draft_tokens_accepted += accepted[sequence]
            if flight.keeps(sequence):
                self._drafter.record(sequence, len(tokens), accepted[sequence])
        self._scheduler.spare.release()

    def _with_masks(self, live: list[Sequence]) -> list[Sequence]:
        """The sequences whose next masks are there, or that need none. For others this is the last token of the step."""
        if not (masked := [s for s in live if s.request.grammar is not None]):
            return live
        self._masks.prepare(masked)
        late = self._masks.late(masked)
        return [s for s in live if s not in late]

    @staticmethod
    def _accepts_draft(flight: Flight, sequence: Sequence, drafts: list[int], accepted: int) -> bool:
        return accepted < len(drafts) and flight.keeps(sequence) and sequence.tokens[-1] == drafts[accepted]

    def _computed(self, sequence: Sequence, count: int, span: StepSpan, output: StepOutput) -> None:
        """`count` more tokens have their KV: blocks that they fill are cached. A failure ends the request."""
        try:
            if count:
                self._advance(sequence, count, span)
            self._prefixes.register(sequence, sequence.num_computed)
        except Exception as error:
            self._fail(sequence, engine_request_error(error), output)

    def _take(self, pending: PendingTokens, flight: Flight) -> None:
        """Append drawn tokens to their sequences, and add them to the step's output."""
        output = flight.output
        for index, drawn in enumerate(pending.results()):
            sequence = pending.draws[index].sequence
            if not flight.keeps(sequence):
                continue
            try:
                if isinstance(drawn, EngineRequestError):
                    raise drawn
                self._accept(sequence, drawn, output)
                output.tokens.extend(drawn)
                self._counters.output_tokens += len(drawn)
            except Exception as error:
                fail = self._unsound if pending.unsound(index) else self._fail
                fail(sequence, engine_request_error(error), output)

    def append_tokens(self, first: Sequence, tokens: Seq[TokenOutput]) -> None:
        """Append to the choice `first` its token. The other tokens, at the end of a prompt, begin choices of their own."""
        for token in tokens:
            if token.choice == first.choice:
                continue
            sibling = self._scheduler.fork(first, token.choice, token.token_id)
            if token.finish is not None:
                self._scheduler.finish(sibling)
        own = next(token for token in tokens if token.choice == first.choice)
        if first.tokens[-1] < 0:  # stands for it, since the next step was launched
            first.tokens[-1] = own.token_id
        else:
            first.tokens.append(own.token_id)
        if own.finish is not None:
            self._scheduler.finish(first)

    def _advance(self, sequence: Sequence, count: int, span: StepSpan) -> None:
        """Record that `count` more tokens have their KV; prompt tokens are charged their share of the step's time."""
        prompt = max(0, min(sequence.num_computed + count, sequence.num_prompt) - sequence.num_computed)
        if prompt or count > 1:
            work, counters = sequence.prompt_work, self._counters
            work.tokens += prompt
            work.seconds += prompt * (span.ended - span.began) / span.tokens
            counters.prompt_tokens_computed += prompt
            if prompt and (count < sequence.missing or work.chunks):
                counters.prefill_chunks += 1
            work.chunks.append(PromptChunk(span.began, span.ended, count))
        sequence.num_computed += count

    def _new_choices(self, sequence: Sequence) -> int:
        """How many choices are drawn from its logits: all of them at the end of the prompt, then one."""
        request = sequence.request
        fresh = len(sequence.tokens) == sequence.num_prompt + len(request.output_tokens)
        return request.n if fresh and len(self._scheduler.requests[request.request_id]) == 1 else 1

    def _accept(self, sequence: Sequence, tokens: list[TokenOutput], output: StepOutput) -> None:
        request_id = sequence.request.request_id
        if sequence.request.prefill_only:
            self._scheduler.park(request_id)
            output.done.append(request_done([sequence]))
            return
        self.append_tokens(sequence, tokens)
        if sequence.state is not S.FINISHED:
            return
        choices = self._scheduler.requests[request_id]
        if all(s.state is S.FINISHED for s in choices):
            output.done.append(request_done(choices))
            self._scheduler.remove(request_id)

    def _unsound(self, sequence: Sequence, error: EngineRequestError, output: StepOutput) -> None:
        """End a request for numbers that are not finite. What it has found or cached of its prompt may be why, and would
        fail the next request as well."""
        self._scheduler.invalidate(sequence.request.request_id)
        self._fail(sequence, error, output)

    def _fail(self, sequence: Sequence, error: EngineRequestError, output: StepOutput) -> None:
        """End the whole request. One that exports KV keeps its blocks until `abort`: they may still be read."""
        request_id = sequence.request.request_id
        level = logging.WARNING if error.field else logging.ERROR  # a field of the request is the reason
        # Where options end an answer, the place in the code says nothing, and clients could fill the log with it
        cause = None if isinstance(error, DeadEndError) else error.__cause__
        log.log(level, "request %s failed: %s", request_id, error.message, exc_info=cause)
        output.done.append(request_done(self._scheduler.requests[request_id], error=error))
        if sequence.request.export:
            self._scheduler.park(request_id)
        else:
            self._scheduler.remove(request_id)


def embedding(sequence: Sequence, kind: Pooling, whole: Tensor) -> PromptEmbedding:
    """Raises EngineRequestError if it is not finite."""
    request = sequence.request
    made = vector(kind, whole, sequence.num_prompt)
    return PromptEmbedding(request.request_id, request.prompt_tokens[-1], made)


def request_done(
    choices: Seq[Sequence], *, preempted: bool = False, error: EngineRequestError | None = None
) -> RequestDone:
    first = choices[0]
    return RequestDone(
        first.request.request_id,
        preempted,
        min(first.cached_tokens, first.num_prompt),
        first.prompt_work.tokens,
        first.prompt_work.seconds,
        tuple(first.prompt_work.chunks),
        error,
    )
