"""Which sequences of a step get drafts, and how many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

from cluster.config.worker import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.plan import table_rows
from engine.scheduler.decision import StepDecision
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.speculation.prompt_lookup import PromptLookup


class Proposer(Protocol):
    """Proposes the draft tokens of one sequence."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `tokens`, which begin with those of the last call."""


# Rows of a step, drafts included, up to which another row costs little beside reading the weights.
MOST_ROWS = 16

# Tokens that the drafts of a step may attend to in all where other sequences wait for it; or as many as its own tokens do.
# Each draft attends to its context again: with long contexts this takes longer than reading the weights.
MOST_ATTENDED = 65_536

LONGEST_PAUSE = 64  # tokens without drafts, after steps that accepted none
LONGEST_SEARCH_PAUSE = 16  # tokens without a search, after searches that found nothing


@dataclass
class DraftState:
    """The proposer of a sequence, and how many drafts the sequence gets next."""

    proposer: Proposer
    count: int = 2
    failures: int = 0  # steps in a row that accepted no draft
    empty_searches: int = 0  # in a row
    resume_at: int = 0  # length of the sequence from which it gets drafts again

    def record(self, length: int, drafted: int, accepted: int, most: int) -> None:
        """Of `drafted` drafts the first `accepted` were accepted; the sequence has `length` tokens now.

        The count doubles up to `most` while all are accepted; otherwise it is one more than were. Pauses double while none
        is.
        """
        if accepted:
            self.failures = 0
            self.count = min(most, 2 * self.count if accepted == drafted else accepted + 1)
            return
        self.failures += 1
        self.count = 1
        self.resume_at = length + min(LONGEST_PAUSE, 1 << self.failures)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Drafts from the proposer. Pauses double from the third empty search in a row on: a search takes about 0.1 ms."""
        drafts = self.proposer.propose(tokens, count)
        self.empty_searches = 0 if drafts else self.empty_searches + 1
        if pause := min(LONGEST_SEARCH_PAUSE, (1 << self.empty_searches) >> 3):
            self.resume_at = len(tokens) + 1 + pause
        return drafts


class Drafter:
    """Gives drafts to the sequences of a step. They use spare capacity: they take no block that another sequence needs,
    and preempt and evict nothing."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, pool: BlockPool, max_len: int):
        self._most = config.most_drafts
        self.proposer: Callable[[], Proposer] = PromptLookup
        self._scheduler = scheduler
        self._max_len = max_len
        rows = table_rows(config.max_batch_tokens, pool.total)
        self._states = WeakKeyDictionary[Sequence, DraftState]()
        self._rows = min(MOST_ROWS, config.max_batch_requests, rows)

    def draft(self, decision: StepDecision) -> None:
        """Add drafts to a step of single tokens, with blocks for them."""
        scheduled = decision.scheduled
        left = self._rows - len(scheduled)
        if not self._most or left < len(scheduled) or not all(s.missing == 1 for s in scheduled):
            return
        each = left // len(scheduled)
        attended = max(MOST_ATTENDED, sum(len(one.tokens) for one in scheduled)) // len(scheduled)
        for sequence in scheduled:
            affordable = each if len(scheduled) == 1 else min(each, attended // len(sequence.tokens))
            if drafts := self._drafts_for(sequence, min(affordable, self._most)):
                decision.drafts[sequence] = drafts

    def _drafts_for(self, sequence: Sequence, most: int) -> list[int]:
        request, length = sequence.request, len(sequence.tokens)
        output = length - sequence.num_prompt
        # Not before its choices are forked, which the first token does.
        begun = output > len(request.output_tokens) or (request.n == 1 and sequence.num_computed)
        if request.prefill_only or request.export or not begun:
            return []
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = DraftState(self.proposer())
        # The last token that the request may have is no draft, because no token is drawn after it.
        most = min(most, state.count, request.sampling.max_tokens - output - 1, self._max_len - length - 1)
        if length < state.resume_at or most <= 0:
            return []
        drafts = state.propose(sequence.tokens, most)
        room = self._scheduler.grow_spare(sequence, length + len(drafts)) - length
        return drafts[:room]

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Of the sequence's `drafted` drafts the first `accepted` were accepted."""
        self._states[sequence].record(len(sequence.tokens), drafted, accepted, self._most)
