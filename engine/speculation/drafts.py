"""Which sequences of a step get drafts, and how many."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from cluster.config.worker import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.plan import table_rows
from engine.scheduler.decision import StepDecision
from engine.scheduler.sequence import Sequence
from engine.scheduler.spare import SpareBlocks
from engine.speculation.base import DraftMethod
from engine.speculation.draft_gate import DraftGate

log = logging.getLogger(__name__)
# Rows of a step, drafts included, up to which another row costs little beside reading the weights.
MAX_ROWS = 16

# Tokens that the drafts of a step may attend to in all where other sequences wait for it; or as many as its own tokens do.
# Each draft attends to its context again: with long contexts this takes longer than reading the weights.
MAX_ATTENDED = 65_536

LONGEST_PAUSE = 64  # tokens without drafts, after steps that accepted none


@dataclass
class DraftState:
    """How many drafts a sequence gets next."""

    count: int = 2
    failures: int = 0  # steps in a row that accepted no draft
    resume_at: int = 0  # length of the sequence from which it gets drafts again

    def record(self, length: int, drafted: int, accepted: int, most: int) -> None:
        """Record that of `drafted` drafts the first `accepted` were accepted; the sequence has `length` tokens now.

        If all were, the count doubles, up to `most`; otherwise it becomes `accepted` + 1. A pause follows a step that
        accepted none; it doubles with each such step in a row.
        """
        if accepted:
            self.failures = 0
            self.count = min(most, 2 * self.count if accepted == drafted else accepted + 1)
            return
        self.failures += 1
        self.count = 1
        self.resume_at = length + min(LONGEST_PAUSE, 1 << self.failures)


class Drafter:
    """Gives drafts to the sequences of a step. They use spare capacity: they take no block that another sequence needs,
    and preempt and evict nothing."""

    def __init__(
        self,
        config: EngineConfig,
        spare: SpareBlocks,
        pool: BlockPool,
        max_len: int,
        method: DraftMethod | None,
    ):
        """Without a method no sequence gets drafts."""
        self.method = method
        # Prompt lookup needs none: a search takes 0.1 ms, and up to MAX_ROWS another row costs little.
        self.gate = DraftGate() if config.draft_model is not None else None
        self._asked = False  # whether the method was asked for drafts of the last step
        self.failures = 0  # of the method; it is not used again
        self._most = config.most_drafts
        self._spare = spare
        self._max_len = max_len
        rows = table_rows(config.max_batch_tokens, pool.total)
        self._states = WeakKeyDictionary[Sequence, DraftState]()
        self._rows = min(MAX_ROWS, config.max_batch_requests, rows)

    def draft(self, decision: StepDecision) -> None:
        """Add drafts to a step of single tokens, with blocks for them."""
        scheduled, self._asked = decision.scheduled, False
        left = self._rows - len(scheduled)
        if self.method is None or left < len(scheduled) or not all(s.missing == 1 for s in scheduled):
            return
        each = left // len(scheduled)
        attended = max(MAX_ATTENDED, sum(len(one.tokens) for one in scheduled)) // len(scheduled)
        asked = dict[Sequence, int]()
        for sequence in scheduled:
            affordable = each if len(scheduled) == 1 else min(each, attended // len(sequence.tokens))
            if (most := self._most_of(sequence, min(affordable, self._most))) > 0:
                asked[sequence] = most
        if not asked or (self.gate is not None and not self.gate.allows(len(scheduled))):
            return
        self._asked = True
        for sequence, drafts in self._proposed(asked).items():
            length = len(sequence.tokens)
            room = self._spare.grow(sequence, length + len(drafts)) - length
            if drafts := drafts[:room]:
                decision.drafts[sequence] = drafts

    def _proposed(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Drafts of the method. An error of it turns drafting off, and fails no request."""
        assert self.method is not None, "`draft` has checked it"
        try:
            return self.method.propose(asked)
        except Exception as error:
            name = type(error).__name__
            log.error("speculation has failed and stays off until this worker restarts: %s: %s", name, error)
            self.failures += 1
            self.method = None
            return {}

    def _most_of(self, sequence: Sequence, most: int) -> int:
        """The most drafts of a sequence in this step, of up to `most`; 0 or less if it gets none."""
        request, length = sequence.request, len(sequence.tokens)
        output = length - sequence.num_prompt
        # Not before its choices are forked, which the first token does.
        begun = output > len(request.output_tokens) or (request.n == 1 and sequence.num_computed)
        if request.prefill_only or request.export or not begun:
            return 0
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = DraftState()
        if length < state.resume_at:
            return 0
        if self.gate is not None:  # drafting takes time: none that would be dropped
            most = min(most, self._spare.tokens(sequence) - length)
        # The last token that the request may have is no draft, because no token is drawn after it.
        return min(most, state.count, request.sampling.max_tokens - output - 1, self._max_len - length - 1)

    def step_ended(self, decision: StepDecision, seconds: float, tokens: int) -> None:
        """Record the duration and the tokens of the step that `draft` was called for last. One in which the draft model
        only caught up counts neither as a step with drafts nor as one without."""
        sequences = len(decision.scheduled)
        if self.gate is None or not tokens:
            return
        if decision.drafts:
            self.gate.record_drafted(sequences, seconds, tokens)
        elif self._asked:
            self.gate.record_catching_up(sequences, seconds)
        elif sum(decision.scheduled.values()) == sequences <= self._rows:
            self.gate.record_plain(sequences, seconds)

    def record(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Record that the first `accepted` of the sequence's `drafted` drafts were accepted."""
        self._states[sequence].record(len(sequence.tokens), drafted, accepted, self._most)
