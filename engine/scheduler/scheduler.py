"""Owns all sequences, their queues and blocks; decides what a step computes.

Running sequences come first, single tokens before chunks; then waiting ones are admitted while the token budget, the
seats and the blocks last (`waiting.py`). A tenant that waits for blocks has a claim to those that become free
(`blocks.py`).

Where the token budget does not cover all running sequences, they take turns by tenant (`turns.py`), and the batch counts
as full. A share of the budget is then kept for prompts: of running sequences, and of waiting ones that may join.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import attrgetter

from cluster.config.worker import EngineConfig
from cluster.errors import BlocksExhaustedError
from engine.cache.block_pool import BlockPool
from engine.plan import table_rows
from engine.request import EngineRequest
from engine.scheduler.aging import Aging, Clock
from engine.scheduler.blocks import Blocks
from engine.scheduler.decision import StepDecision
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.refusals import Offer, Refusals
from engine.scheduler.reservations import Reservations
from engine.scheduler.seats import Batch
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.shares import Victims
from engine.scheduler.spare import SpareBlocks
from engine.scheduler.table_rows import TableRows
from engine.scheduler.turns import KEPT_FOR_PROMPTS, Turns, singles_and_chunks
from engine.scheduler.waiting import WaitingQueue


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool, prefixes: PrefixCache, clock: Clock):
        self._config = config
        self._pool = pool
        self._prefixes = prefixes
        self._page = config.page_size
        self._arrivals = itertools.count()
        self.claims = GrowthClaims(config.page_size, config.max_model_len)
        self.blocks = Blocks(pool, prefixes, self.claims)
        self._turns = Turns()
        self.rows = TableRows(table_rows(config.max_batch_tokens, pool.total))
        self.requests: dict[str, list[Sequence]] = {}  # the choices of each
        self.running: dict[Sequence, None] = {}
        self.reservations = Reservations()
        self.refusals = Refusals(pool.total, clock)
        self._batch = Batch(config, self.running)
        self._queue = WaitingQueue(
            config, pool, self.blocks, self.claims, self.refusals, self._batch, self.running, Aging(clock)
        )
        self.waiting = self._queue.sequences
        self._victims: Victims | None = None  # of the present step, once one is preempted
        wanted = lambda: bool(self.waiting or self.short_of_blocks)  # noqa: E731
        self.spare = SpareBlocks(pool, self.blocks, self.claims, self.refusals, self.running, wanted)

    @property
    def has_work(self) -> bool:
        return any(not s.paused for queue in (self.waiting, self.running) for s in queue)

    @property
    def short_of_blocks(self) -> bool:
        """In the last step, for waiting sequences."""
        return self._queue.short_of_blocks

    @property
    def batch_full(self) -> bool:
        """Whether a tenant with running sequences gets no seat for a waiting one. Any thread."""
        return self._batch.full

    def blocks_for(self, tokens: int) -> int:
        return self.blocks.count(tokens)

    def sequences(self) -> list[Sequence]:
        """Any thread; the list of requests is copied at once, so that a step may change them meanwhile."""
        return [s for choices in list(self.requests.values()) for s in choices]

    # --- requests --------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._queue.add(self._new_sequence(request, S.WAITING))

    def reserve(self, request: EngineRequest, block_hashes: Seq[bytes], max_tokens: int) -> Sequence:
        """Allocate blocks for KV that will arrive, and for growth up to `max_tokens` tokens of each choice.

        `block_hashes` are those of full blocks of the request's tokens. Raises BlocksExhaustedError.
        """
        held = self._prefixes.match(block_hashes)
        total, need = self.blocks.of_hand_off(request, max_tokens, len(held))
        free = self.blocks.free(held)
        if not self.has_work:
            self.refusals.no_steps(request)
        what = (len(request.prompt_tokens), total, request.n, *block_hashes[-1:])
        offer = Offer(request, self.refusals.rank(request), need, next(self._arrivals), what)
        room = self._room_for_hand_off(offer, free)
        if need > room:
            if need <= self._pool.total:
                self.refusals.refused(offer)
            why = f"{need} KV blocks are needed, {max(0, room)} are free that no other has a claim to"
            raise BlocksExhaustedError(why, retry_after_seconds=0.05)
        self.refusals.taken(offer)
        sequence = self._new_sequence(request, S.WAITING_FOR_KV)
        self.reservations.add(sequence)
        self.blocks.allocate(sequence, held, total)
        return sequence

    def _room_for_hand_off(self, offer: Offer, free: int) -> int:
        request, rank, need, refusals = offer.request, offer.rank, offer.need, self.refusals
        room = free - refusals.kept_from(offer)
        if need > room:
            return room
        first, most = self._queue.first_of_each()
        waiting = (one for one in first if one.rank < rank or not refusals.first(request, one))
        claims = refusals.claims_against(offer)
        return min(room, self.blocks.room(need, free, request, rank, claims, waiting, most))

    def start_reserved(self, sequence: Sequence) -> None:
        """Run a reservation for which the KV of all tokens has arrived."""
        sequence.num_computed = len(sequence.tokens)
        self._prefixes.register(sequence, len(sequence.tokens))
        sequence.machine.to(S.RUNNING)
        self.reservations.remove(sequence)
        self._run(sequence)

    def fork(self, first: Sequence, choice: int, token_id: int) -> Sequence:
        """Add a choice that continues with `token_id`. It shares the blocks; the last one is copied when written to."""
        used = first.blocks[: self.blocks_for(len(first.tokens))]
        self._pool.retain(used)
        sibling = first.fork(choice, token_id, used)
        self.requests[first.request.request_id].append(sibling)
        self._run(sibling)
        return sibling

    def _run(self, sequence: Sequence) -> None:
        self.running[sequence] = None
        self._queue.changed()

    def park(self, request_id: str) -> None:
        """Stop computing the request but keep its blocks until `remove`."""
        for sequence in self.requests.get(request_id, ()):
            self._dequeue(sequence)
            if sequence.state is S.RUNNING:
                sequence.machine.to(S.HELD)

    def finish(self, sequence: Sequence) -> None:
        if sequence.state is S.FINISHED:
            return
        self._dequeue(sequence)
        sequence.machine.to(S.FINISHED)
        self.blocks.release(sequence)

    def remove(self, request_id: str, verified_tokens: int = 0) -> bool:
        """Free the request's blocks; see Engine.abort."""
        sequences = self.requests.pop(request_id, None)
        if sequences is None:
            return False
        for sequence in sequences:
            if sequence.state in (S.WAITING_FOR_KV, S.EVICTED) and verified_tokens:
                self._prefixes.register(sequence, verified_tokens)
            self.finish(sequence)
        return True

    def set_paused(self, request_id: str, paused: bool) -> None:
        self._queue.changed()
        for sequence in self.requests.get(request_id, ()):
            sequence.paused = paused

    def invalidate(self, request_id: str) -> None:
        """Remove from the prefix cache what this request has computed or found there."""
        for sequence in self.requests.get(request_id, ()):
            self._pool.invalidate(sequence.blocks)

    def _new_sequence(self, request: EngineRequest, state: S) -> Sequence:
        tokens = [*request.prompt_tokens, *request.output_tokens]
        sequence = Sequence(request, request.first_choice, tokens, next(self._arrivals), state)
        sequence.hashes = self._prefixes.hashes_of(tokens, request)
        self.requests[request.request_id] = [sequence]
        return sequence

    def _dequeue(self, sequence: Sequence) -> None:
        self._queue.left(sequence)
        self.running.pop(sequence, None)
        self.reservations.remove(sequence)
        self.claims.remove(sequence)
        self.rows.release(sequence)

    # --- a step ----------------------------------------------------------------------------------------

    def schedule(self) -> StepDecision:
        decision = StepDecision()
        self._begin_step()
        if self._queue.admit_alone(decision):
            return decision
        budget = self._config.max_batch_tokens
        if self._batch.crowded_by(len(self.running)) and self._schedule_in_turns(decision):
            return decision
        self._turns.all_covered()
        singles, chunks = list[Sequence](), list[Sequence]()
        for one in sorted(self.running, key=attrgetter("order")):
            (chunks if len(one.tokens) - one.num_computed > 1 else singles).append(one)
        self._schedule_prompts(chunks, self._compute(singles, budget, decision), decision)
        return decision

    def _schedule_prompts(self, chunks: list[Sequence], budget: int, decision: StepDecision) -> None:
        """Begun prompts in their order, then waiting ones. The first leaves a part of the step to those of other tenants,
        of its class or a higher one: it may take many steps, and they only wait for it."""
        if not chunks:
            self._queue.admit(budget, decision)
            return
        first, *later = chunks
        tenant = first.request.tenant
        joining = (*later, *self._queue.first_of_each()[0])
        others = [one for one in joining if one.rank <= first.rank and one.request.tenant != tenant]
        kept = min(budget // KEPT_FOR_PROMPTS, sum(one.missing for one in others))
        budget = kept + self._compute([first], budget - kept, decision)
        if kept:
            later.sort(key=lambda one: (one.rank, one.request.tenant == tenant, one.arrival))
        budget = self._compute(later, budget, decision)
        if kept:
            budget = self._queue.admit(budget, decision, {tenant})
        budget = self._queue.admit(budget, decision)
        if kept and budget > 0 and first in decision.scheduled:
            self._extend(first, budget, decision)

    def _extend(self, sequence: Sequence, budget: int, decision: StepDecision) -> None:
        """More tokens of a scheduled sequence, as far as there are free blocks."""
        count = decision.scheduled[sequence]
        count += min(sequence.missing - count, budget)
        tokens = sequence.num_computed + count
        if self.blocks.wanted(sequence, tokens) <= self._pool.num_free and self._grow(
            sequence, tokens, decision
        ):
            decision.scheduled[sequence] = count

    def _begin_step(self) -> None:
        self.spare.release()  # of a step that has failed
        self.blocks.begin_step()
        self.reservations.begin_step()
        self.refusals.begin_step()
        self._queue.begin_step()
        self._victims = None

    def _schedule_in_turns(self, decision: StepDecision) -> bool:
        """Schedule the step if its budget does not cover all running sequences; returns whether it does not."""
        singles, chunks = singles_and_chunks(self.running)
        budget = self._config.max_batch_tokens
        may_join = self._batch.crowded_by(len(singles)) and self._queue.may_join
        kept = self._turns.kept(budget) if chunks or may_join else 0
        if len(singles) <= budget - kept:
            return False
        turns, chunks_in_turn = self._turns.order(singles, chunks)
        budget = kept + self._compute(turns, budget - kept, decision)
        budget = self._compute(chunks_in_turn, budget, decision)
        if may_join:
            budget = self._queue.admit(budget, decision)
        self._compute((s for s in turns if s not in decision.scheduled), budget, decision)
        self._turns.taken(decision.scheduled)
        return True

    def _compute(self, ordered: Iterable[Sequence], budget: int, decision: StepDecision) -> int:
        """Schedule running sequences in this order, no further than needed; returns the token budget that is left."""
        if budget <= 0:
            return budget
        # For every running sequence in every step: fewer calls, and few need blocks. One that this step has preempted does
        # not run any more.
        running, wanted = self.running, self.blocks.wanted
        for sequence in ordered:
            if sequence.paused or sequence.awaits_mask or sequence not in running:
                continue
            computed = sequence.num_computed
            count = min(len(sequence.tokens) - computed, budget)
            tokens = computed + count
            if not wanted(sequence, tokens) or self._grow(sequence, tokens, decision):
                decision.scheduled[sequence] = count
                budget -= count
                if budget <= 0:
                    break
        return budget

    def _grow(self, sequence: Sequence, tokens: int, decision: StepDecision) -> bool:
        """Allocate blocks for the first `tokens` tokens; a shared block that is written to is copied. False: the
        sequence is not in this step."""
        if not self.blocks.wanted(sequence, tokens):
            return True
        while (wanted := self.blocks.wanted(sequence, tokens)) > self._pool.num_free:
            if not self._make_room(sequence, decision):
                if sequence.state is S.RUNNING:
                    self.claims.short_of(sequence, wanted)
                return False
        if (copy := self.blocks.grow(sequence, tokens)) is not None:
            decision.copies[sequence] = copy
            sequence.blocks_in_row = min(sequence.blocks_in_row, sequence.num_computed // self._page)
        return True

    # --- when blocks are short -------------------------------------------------------------------------

    def _make_room(self, growing: Sequence, decision: StepDecision) -> bool:
        """False if `growing` itself was preempted, or waits for a reservation's blocks: these are not free within the
        step, because parts of the reservation's KV may be landing in them."""
        if self.reservations.eviction_pending:
            return False
        if (victim := self.reservations.evict(growing, self.blocks.shares)) is not None:
            decision.evicted_reservations.append(victim.request.request_id)
            self.claims.evicted_for(growing)
            return False
        if self._victims is None:
            self._victims = Victims(self.running, self.blocks.shares)
        self.preempt(self._victims.next(), decision)
        # The victim may be another choice of its request, which is returned with all of them.
        return growing.state is S.RUNNING

    def preempt(self, victim: Sequence, decision: StepDecision) -> None:
        """Free the victim's blocks, scheduled or not: nothing is computed yet. It is computed again later; if it is too
        long for that, its whole request is returned to the router."""
        decision.preemptions += 1
        limit = self._config.recompute_limit_tokens
        if limit and len(victim.tokens) > limit:
            choices = self.requests.pop(victim.request.request_id)
            decision.returned.append(choices)
            for choice in choices:
                decision.drop(choice)
                self.finish(choice)
            return
        decision.drop(victim)
        del self.running[victim]
        self.rows.release(victim)
        self.claims.preempted(victim)
        self.blocks.release(victim)
        victim.preempt()
        self._queue.add(victim)
