"""The sequences that wait for the running batch, and which of them a step admits.

They are admitted in order of class and arrival, while the token budget, the seats (`seats.py`) and the blocks last. Behind
one that waits for blocks, those of other tenants of its class may join (`ahead.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from cluster.config.worker import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.scheduler.aging import Aging
from engine.scheduler.ahead import Ahead
from engine.scheduler.blocks import Blocks
from engine.scheduler.decision import StepDecision
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.refusals import Refusals
from engine.scheduler.seats import Batch
from engine.scheduler.sequence import Sequence, rank_of
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.turns import KEPT_FOR_PROMPTS


class WaitingQueue:
    """`running`: what is admitted is added to it; who else changes it calls `changed`."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        blocks: Blocks,
        claims: GrowthClaims,
        refusals: Refusals,
        batch: Batch,
        running: dict[Sequence, None],
        aging: Aging,
    ):
        self._config = config
        self._pool = pool
        self._blocks = blocks
        self._claims = claims
        self._refusals = refusals
        self._batch = batch
        self._running = running
        self._aging = aging
        self.sequences: list[Sequence] = []  # by `order`
        self.short_of_blocks = False  # in the last step
        self._alone: Sequence | None = None  # waits for a step of its own
        self._together = KEPT_FOR_PROMPTS  # steps since the last one of that kind
        self._first: list[Sequence] | None = None  # None once a sequence has come, paused or left
        self._first_need = 0  # blocks that these need at most

    def add(self, sequence: Sequence) -> None:
        sequence.waits_since = self._aging.clock()
        insort(self.sequences, sequence, key=attrgetter("order"))
        self.changed()

    def left(self, sequence: Sequence) -> None:
        """The sequence runs or waits no longer."""
        if sequence.state is S.WAITING and sequence in self.sequences:  # else it is parked
            self.sequences.remove(sequence)
        self.changed()

    def changed(self) -> None:
        """A sequence runs, has paused or left: others may join."""
        self._first = None

    def begin_step(self) -> None:
        self._first, self.short_of_blocks = None, False
        if not self.sequences:
            self._batch.none_waits()
        elif self._aging.rise(self.sequences):
            self.sequences.sort(key=attrgetter("order"))

    @property
    def may_join(self) -> bool:
        """Whether there is a seat for any."""
        if not self.sequences:
            return False
        return next(self._batch.seats(self.sequences).each(self.sequences), None) is not None

    def first_of_each(self) -> tuple[list[Sequence], int]:
        """The first sequence of each tenant, if it may join, in order; and how many blocks these need at most."""
        if self._first is None:
            seats = self._batch.seats(self.sequences) if self.sequences else None
            self._first = seats.first_of_each(self.sequences) if seats else []
            self._first_need = sum(self._blocks.count(len(one.tokens)) for one in self._first)
        return self._first, self._first_need

    def admit(self, budget: int, decision: StepDecision, passed: Iterable[str] = ()) -> int:
        """Admit while there are seats, tokens and blocks, of tenants that are not `passed`; returns the token budget that
        is left."""
        if not self.sequences or budget <= 0:
            return budget
        seats, ahead, passed = self._batch.seats(self.sequences), self._ahead(), set(passed)
        for sequence in seats.each(list(self.sequences), passed):
            if not self._pool.num_free:
                self.short_of_blocks = True
                break
            count = self._admit(sequence, budget, decision, ahead)
            if count:
                budget -= count
                seats.take(sequence)
            elif self._alone is not None:
                break
            else:
                self.short_of_blocks = True
                passed.add(sequence.request.tenant)
            if budget <= 0:
                break
        return budget

    def admit_alone(self, decision: StepDecision) -> bool:
        """Admit the prompt that waits for a step of its own, in a quarter of the steps. False if none does, or it lacks
        blocks."""
        sequence, self._alone = self._alone, None
        self._together += 1
        if self._together < KEPT_FOR_PROMPTS or sequence not in self.sequences or sequence.rests:
            return False
        seats = self._batch.seats(self.sequences)
        if not self._admit(sequence, self._config.max_batch_tokens, decision, self._ahead()):
            return False
        seats.take(sequence)
        self._together = 0
        return True

    def _ahead(self) -> Ahead:
        return Ahead(self._pool, self._blocks.shares, self._claims, self._refusals.claims())

    def _admit(self, sequence: Sequence, budget: int, decision: StepDecision, ahead: Ahead) -> int:
        """Returns how many of its tokens the step computes. 0 if it must wait: for blocks, and is `ahead` of later ones
        then, with what it needs; or for a step of its own."""
        least = self._blocks.least_need(sequence)
        if least and least > ahead.room(sequence, least, self._pool.num_free):
            ahead.passed(sequence, sequence.claim)
            return 0
        held, total = self._blocks.needs(sequence)
        missing = len(sequence.tokens) - self._blocks.tokens(len(held))
        need, cached = total - len(held), self._pool.free_among(held)
        if need > ahead.room(sequence, need, self._pool.num_free - cached):
            sequence.found, sequence.claim = len(held), need + cached
            ahead.passed(sequence, sequence.claim)
            return 0
        if missing > budget and not self._config.chunked_prefill:
            if decision.scheduled:
                self._alone = sequence
                return 0
            budget = missing
        self._blocks.allocate(sequence, held, total)
        ahead.admitted(sequence.request.tenant)
        self._join(sequence)
        decision.cached_tokens += sequence.cached_tokens
        decision.scheduled[sequence] = min(missing, budget)
        return decision.scheduled[sequence]

    def _join(self, sequence: Sequence) -> None:
        sequence.num_computed = sequence.cached_tokens
        self.sequences.remove(sequence)
        self._aging.admitted(sequence)
        # What it has aged to was for its turn; running, it would outrank others for as long as it runs.
        sequence.set_rank(rank_of(sequence.request.priority))
        sequence.machine.to(S.RUNNING)
        self._running[sequence] = None
        self.changed()
