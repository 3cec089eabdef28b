"""Owns all sequences, their queues and blocks; decides what a step computes.

Running sequences come first, single tokens before chunks; then waiting ones are admitted while the token budget, the
batch and the blocks last. A full batch admits those of tenants with few running sequences (`extra_seats.py`).

Where the token budget does not cover all running sequences, they take turns by tenant (`turns.py`), and the batch counts
as full. A share of the budget is then kept for prompts: of running sequences, and of waiting ones that may join.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq
from operator import attrgetter

from cluster.config.worker import EngineConfig
from cluster.errors import BlocksExhaustedError
from engine.cache.block_pool import BlockPool
from engine.plan import BlockCopy, table_rows
from engine.request import EngineRequest
from engine.scheduler.decision import StepDecision
from engine.scheduler.extra_seats import ExtraSeats
from engine.scheduler.growth import GrowthClaims, choose_victim, reservation_for
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.sequence import HIGHEST_RANK, Sequence, rank_of
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.table_rows import TableRows
from engine.scheduler.turns import Turns

# After so long in one class a waiting sequence counts as of the next higher one, so that no class starves another.
AGING_SECONDS = 30.0
KEPT_FOR_PROMPTS = 4  # a step whose budget does not cover all keeps this part of it, a quarter, for prompts


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool, prefixes: PrefixCache):
        self._config = config
        self._pool = pool
        self._prefixes = prefixes
        self._page = config.page_size
        self._arrivals = itertools.count()
        self._claims = GrowthClaims(config.page_size, config.max_model_len)
        self._turns = Turns()
        self.rows = TableRows(table_rows(config.max_batch_tokens, pool.total))
        self.requests: dict[str, list[Sequence]] = {}  # the choices of each
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return any(not s.paused for queue in (self.waiting, self.running) for s in queue)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def sequences(self) -> list[Sequence]:
        """Any thread; the list of requests is copied at once, so that a step may change them meanwhile."""
        return [s for choices in list(self.requests.values()) for s in choices]

    # --- requests --------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        self._enqueue(self._new_sequence(request, S.WAITING))

    def reserve(self, request: EngineRequest, block_hashes: Seq[bytes], max_tokens: int) -> Sequence:
        """Allocate blocks for KV that will arrive, and for growth up to `max_tokens` tokens of each choice.

        `block_hashes` are those of full blocks of the request's tokens. Raises BlocksExhaustedError.
        """
        held = self._prefixes.match(block_hashes)
        total = self.blocks_for(max_tokens)
        length = len(request.prompt_tokens) + len(request.output_tokens)
        growth = total - length // self._page  # what every further choice needs of its own
        need = total - len(held) + growth * (request.n - 1)
        room = max(0, self._room(held, rank_of(request.priority)))
        if need > room:
            what = f"{need} KV blocks are needed, {room} are free that running sequences have no claim to"
            raise BlocksExhaustedError(what, retry_after_seconds=0.05)
        sequence = self._new_sequence(request, S.WAITING_FOR_KV)
        self._allocate(sequence, held, total)
        return sequence

    def start_reserved(self, sequence: Sequence) -> None:
        """Run a reservation for which the KV of all tokens has arrived."""
        sequence.num_computed = len(sequence.tokens)
        self._prefixes.register(sequence, len(sequence.tokens))
        sequence.machine.to(S.RUNNING)
        self.running.append(sequence)

    def fork(self, first: Sequence, choice: int, token_id: int) -> Sequence:
        """Add a choice that continues with `token_id`. It shares the blocks; the last one is copied when written to."""
        used = first.blocks[: self.blocks_for(len(first.tokens))]
        self._pool.retain(used)
        sibling = Sequence(
            first.request,
            choice,
            [*first.tokens, token_id],
            first.arrival,
            S.RUNNING,
            blocks=used,
            hashes=list(first.hashes),
            num_computed=len(first.tokens),
            registered_blocks=first.registered_blocks,
            extra_seat=first.extra_seat,
        )
        self.requests[first.request.request_id].append(sibling)
        self.running.append(sibling)
        return sibling

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
        self._pool.free(sequence.blocks)
        sequence.blocks = []

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

    def _allocate(self, sequence: Sequence, held: list[int], total: int) -> None:
        """`total` blocks, of which the prefix cache holds the first ones, `held`."""
        self._pool.retain(held)
        sequence.blocks = held + self._pool.allocate(total - len(held))
        sequence.cached_tokens = len(held) * self._page
        sequence.registered_blocks = len(held)

    def _room(self, held: list[int], rank: int) -> int:
        """Blocks available to a new request of class `rank` that also takes the cached blocks `held`."""
        return self._pool.num_free - self._pool.free_among(held) - self._claims.blocks(rank)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.waits_since = time.monotonic()
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.order)

    def _dequeue(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._claims.remove(sequence)
        self.rows.release(sequence)

    # --- a step ----------------------------------------------------------------------------------------

    def schedule(self) -> StepDecision:
        decision = StepDecision()
        self._claims.begin_step()
        if self.waiting:
            self._age()
        budget = self._config.max_batch_tokens
        ordered = sorted(self.running, key=attrgetter("order"))
        ordered.sort(key=lambda s: s.missing > 1)  # keeps the order among equals
        if len(ordered) > budget - budget // KEPT_FOR_PROMPTS and self._schedule_in_turns(ordered, decision):
            return decision
        budget = self._compute(ordered, budget, decision)
        seats = self._config.max_batch_requests
        while budget > 0 and len(self.running) < seats and (sequence := self._next_waiting()) is not None:
            count = self._admit(sequence, budget, decision)
            if count == 0:
                return decision
            budget -= count
        self._admit_to_full_batch(budget, decision)
        return decision

    def _schedule_in_turns(self, ordered: list[Sequence], decision: StepDecision) -> bool:
        """Schedule the step if its budget does not cover all running sequences; returns whether it does not."""
        ordered = [s for s in ordered if not s.paused]
        chunks = [s for s in ordered if s.missing > 1]
        budget, singles = self._config.max_batch_tokens, len(ordered) - len(chunks)
        may_join = bool(self.waiting) and self._extra_seats().first_allowed(self.waiting) is not None
        kept = budget // KEPT_FOR_PROMPTS if chunks or may_join else 0
        if singles <= budget - kept:
            return False
        turns = self._turns.order(ordered)
        budget = kept + self._compute([s for s in turns if s.missing == 1], budget - kept, decision)
        budget = self._compute([s for s in turns if s.missing > 1], budget, decision)
        budget = self._admit_to_full_batch(budget, decision)
        self._compute([s for s in turns if s not in decision.scheduled], budget, decision)
        self._turns.taken(turns, decision.scheduled)
        return True

    def _compute(self, ordered: Seq[Sequence], budget: int, decision: StepDecision) -> int:
        """Schedule running sequences in this order; returns the token budget that is left."""
        for sequence in ordered:
            if sequence.paused or sequence.state is not S.RUNNING or budget <= 0:
                continue
            count = min(sequence.missing, budget)
            if self._grow(sequence, sequence.num_computed + count, decision):
                decision.scheduled[sequence] = count
                budget -= count
        return budget

    def _extra_seats(self) -> ExtraSeats:
        return ExtraSeats(min(self._config.max_batch_requests, self._config.max_batch_tokens), self.running)

    def _next_waiting(self) -> Sequence | None:
        return next((s for s in self.waiting if not s.paused), None)

    def _admit_to_full_batch(self, budget: int, decision: StepDecision) -> int:
        """Returns the token budget that is left."""
        if not self.waiting or budget <= 0:
            return budget
        seats = self._extra_seats()
        while budget > 0 and (sequence := seats.first_allowed(self.waiting)) is not None:
            count = self._admit(sequence, budget, decision)
            if count == 0:
                return budget
            budget -= count
            seats.take(sequence)
        return budget

    def _age(self) -> None:
        now = time.monotonic()
        aged = [s for s in self.waiting if s.rank > HIGHEST_RANK and now - s.waits_since >= AGING_SECONDS]
        for sequence in aged:
            sequence.set_rank(sequence.rank - 1)
            sequence.waits_since = now
        if aged:
            self.waiting.sort(key=lambda s: s.order)

    def _admit(self, sequence: Sequence, budget: int, decision: StepDecision) -> int:
        """Returns how many of its tokens the step computes; 0 if it must wait."""
        held = self._prefixes.match(sequence.hashes[: (len(sequence.tokens) - 1) // self._page])
        missing = len(sequence.tokens) - len(held) * self._page
        if missing > budget and not self._config.chunked_prefill:
            if decision.scheduled:
                return 0
            budget = missing
        total = self.blocks_for(len(sequence.tokens))
        if total - len(held) > self._room(held, sequence.rank):
            return 0
        self._allocate(sequence, held, total)
        sequence.num_computed = sequence.cached_tokens
        decision.cached_tokens += sequence.cached_tokens
        self.waiting.remove(sequence)
        # What it has aged to was for its turn; running, it would outrank others for as long as it runs.
        sequence.set_rank(rank_of(sequence.request.priority))
        sequence.machine.to(S.RUNNING)
        self.running.append(sequence)
        decision.scheduled[sequence] = min(missing, budget)
        return decision.scheduled[sequence]

    def _grow(self, sequence: Sequence, tokens: int, decision: StepDecision) -> bool:
        """Allocate blocks for the first `tokens` tokens; a shared block that is written to is copied. False: the
        sequence is not in this step."""
        need = max(0, self.blocks_for(tokens) - len(sequence.blocks))
        tail = sequence.num_computed // self._page
        copy = tail < len(sequence.blocks) and self._pool.shared(sequence.blocks[tail])
        if not need and not copy:
            return True
        while need + copy > self._pool.num_free:
            if not self._make_room(sequence, decision):
                self._claims.short_of(sequence, need + copy)
                return False
        if copy:
            (target,) = self._pool.allocate(1)
            decision.copies.append(BlockCopy(sequence.blocks[tail], target))
            self._pool.free([sequence.blocks[tail]])
            sequence.blocks[tail] = target
            sequence.blocks_in_row = min(sequence.blocks_in_row, tail)
        if need > 0:
            sequence.blocks.extend(self._pool.allocate(need))
        return True

    # --- when blocks are short -------------------------------------------------------------------------

    def _make_room(self, growing: Sequence, decision: StepDecision) -> bool:
        """False if `growing` itself was preempted, or waits for a reservation's blocks: these are not free within the
        step, because parts of the reservation's KV may be landing in them."""
        if self.eviction_pending():
            return False
        if self.evict_reservation(growing.rank, decision):
            self._claims.evicted_for(growing)
            return False
        victims = [s for s in self.running if s not in decision.scheduled]
        self._preempt(choose_victim(victims, self.running), decision)
        # The victim may be another choice of its request, which is returned with all of them.
        return growing.state is S.RUNNING

    def eviction_pending(self) -> bool:
        """Whether an evicted reservation has not been aborted yet."""
        return any(s.state is S.EVICTED for s in self.sequences())

    def evict_reservation(self, rank: int, decision: StepDecision) -> bool:
        """Evict the least important and youngest reservation of class `rank` or a lower one. False if there is none.

        It keeps its blocks until the worker aborts it, after the last write to them has ended.
        """
        victim = reservation_for(rank, self.sequences())
        if victim is None:
            return False
        victim.machine.to(S.EVICTED)
        decision.evicted_reservations.append(victim.request.request_id)
        return True

    def _preempt(self, victim: Sequence, decision: StepDecision) -> None:
        """Free the victim's blocks. It is computed again later; if it is too long for that, its whole request is returned
        to the router."""
        decision.preemptions += 1
        limit = self._config.recompute_limit_tokens
        if limit and len(victim.tokens) > limit:
            choices = self.requests.pop(victim.request.request_id)
            decision.returned.append(choices)
            for choice in choices:
                decision.scheduled.pop(choice, None)
                self.finish(choice)
            return
        self.running.remove(victim)
        self.rows.release(victim)
        self._pool.free(victim.blocks)
        victim.blocks = []
        victim.num_computed = victim.registered_blocks = 0
        victim.extra_seat = False
        victim.machine.to(S.WAITING)
        self._enqueue(victim)
