"""Which sequences a step computes, and how many tokens of each. Running ones come first, single tokens before
chunks; then waiting ones are admitted while the token budget, the batch and the blocks last."""

from __future__ import annotations

import time
from collections import Counter
from operator import attrgetter
from typing import Protocol

from cluster.config.worker import EngineConfig
from engine.cache.block_pool import BlockPool
from engine.plan import BlockCopy
from engine.request import StepOutput
from engine.scheduler.growth import PreemptionReserve
from engine.scheduler.sequence import HIGHEST, Sequence
from engine.scheduler.states import SequenceState as S
from engine.scheduler.victim import choose_victim

# After so long in one class a waiting sequence counts as of the next higher one, so that no class starves another.
AGING_SECONDS = 30.0


class Owner(Protocol):
    """What the scheduler asks of the engine when blocks are short."""

    def evict_reservation(self, output: StepOutput, rank: int) -> bool:
        """Asks the owner of the least important and youngest reservation for its blocks, unless one was asked
        before and has not answered. False: there is none of `rank` or a lower class."""

    def return_to_router(self, victim: Sequence, output: StepOutput) -> bool:
        """A preempted sequence that is too long to be computed again here leaves. False: it stays and waits."""


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool, owner: Owner, count: Counter[str]):
        self._config = config
        self._pool = pool
        self._owner = owner
        self._count = count
        self._page = config.page_size
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.copies: list[BlockCopy] = []
        self._short: list[tuple[Sequence, int]] = []  # who was left out of the last step for so many blocks
        self._set_aside = PreemptionReserve(config.page_size, config.max_model_len)

    def enqueue(self, sequence: Sequence) -> None:
        sequence.waits_since = time.monotonic()
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.order)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self._set_aside.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or any(not s.paused for s in self.running)

    def room(self, held: list[int], rank: int) -> int:
        """Blocks available to a new request of class `rank` that also takes the cached blocks `held`.

        Excludes blocks that running sequences of the same or a higher class wait for or have set aside for growth.
        """
        owed = {s: self._set_aside.owed(s) for s in self._set_aside.sequences()}
        for sequence, count in self._short:
            owed[sequence] = max(count, owed.get(sequence, 0))
        theirs = sum(n for s, n in owed.items() if s.state is S.RUNNING and not s.paused and s.rank <= rank)
        return self._pool.num_free - self._pool.free_among(held) - theirs

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._page)

    def schedule(self, output: StepOutput) -> list[tuple[Sequence, int]]:
        """(sequence, tokens to compute); their blocks are taken. What blocks run short for is told in `output`."""
        budget = self._config.max_batch_tokens
        scheduled: list[tuple[Sequence, int]] = []
        busy: set[Sequence] = set()
        self._short.clear()
        ordered = sorted(self.running, key=attrgetter("order"))
        ordered.sort(key=lambda s: s.missing > 1)  # keeps the order among equals
        for sequence in ordered:
            if sequence.paused or sequence.state is not S.RUNNING or budget <= 0:
                continue
            count = min(sequence.missing, budget)
            if not self._grow(sequence, sequence.num_computed + count, output, busy):
                continue
            scheduled.append((sequence, count))
            busy.add(sequence)
            budget -= count
        scheduled = [(s, n) for s, n in scheduled if s.state is S.RUNNING]
        if self.waiting:
            self._age()
        while self.waiting and budget > 0 and len(self.running) < self._config.max_batch_requests:
            sequence = self.waiting[0]
            count = self._admit(sequence, budget, bool(scheduled))
            if count == 0:
                break
            scheduled.append((sequence, count))
            budget -= count
        return scheduled

    def _age(self) -> None:
        now = time.monotonic()
        aged = [s for s in self.waiting if s.rank > HIGHEST and now - s.waits_since >= AGING_SECONDS]
        for sequence in aged:
            sequence.rank -= 1
            sequence.order = (sequence.rank, sequence.arrival)
            sequence.waits_since = now
        if aged:
            self.waiting.sort(key=lambda s: s.order)

    def _admit(self, sequence: Sequence, budget: int, others: bool) -> int:
        held: list[int] = []
        if self._config.prefix_caching:
            held = self._pool.match(sequence.hashes[: (len(sequence.tokens) - 1) // self._page])
        missing = len(sequence.tokens) - len(held) * self._page
        if not self._config.chunked_prefill:
            if others and missing > budget:
                return 0
            count = missing
        else:
            count = min(missing, budget)
        need = self.blocks_for(len(sequence.tokens)) - len(held)
        if need > self.room(held, sequence.rank):
            return 0
        self._pool.retain(held)
        sequence.blocks = held + self._pool.allocate(need)
        sequence.num_computed = sequence.cached_tokens = len(held) * self._page
        sequence.registered_blocks = len(held)
        self._count["cached"] += sequence.cached_tokens
        self.waiting.pop(0)
        sequence.machine.to(S.RUNNING)
        self.running.append(sequence)
        return count

    def _grow(self, sequence: Sequence, tokens: int, output: StepOutput, busy: set[Sequence]) -> bool:
        """Blocks for the first `tokens` tokens, the written ones its own. False: it is not in this step."""
        need = max(0, self.blocks_for(tokens) - len(sequence.blocks))
        tail = sequence.num_computed // self._page
        copy = tail < len(sequence.blocks) and self._pool.shared(sequence.blocks[tail])
        if not need and not copy:
            return True
        while need + copy > self._pool.num_free:
            if not self._make_room(sequence, output, busy):
                self._short.append((sequence, need + copy))
                return False
        if copy:
            (fresh,) = self._pool.allocate(1)
            self.copies.append(BlockCopy(sequence.blocks[tail], fresh))
            self._pool.free([sequence.blocks[tail]])
            sequence.blocks[tail] = fresh
        if need > 0:
            sequence.blocks.extend(self._pool.allocate(need))
        return True

    def _make_room(self, wanting: Sequence, output: StepOutput, busy: set[Sequence]) -> bool:
        """False: `wanting` itself had to go, or it waits. The blocks of a reservation cannot be had within a step:
        parts of its KV may be landing in them until its owner has seen to it that none does."""
        before = len(output.evicted_reservations)
        if self._owner.evict_reservation(output, wanting.rank):
            if len(output.evicted_reservations) > before:
                self._set_aside.evicted_for(wanting)
            return False
        victims = [s for s in self.running if s not in busy]
        victim = choose_victim(victims, self.running)
        self._preempt(victim, output)
        return wanting.state is S.RUNNING  # it goes as well where the victim is another choice of its request

    def _preempt(self, victim: Sequence, output: StepOutput) -> None:
        self._count["preemptions"] += 1
        self.running.remove(victim)
        self._pool.free(victim.blocks)
        victim.blocks = []
        victim.num_computed = victim.registered_blocks = 0
        victim.machine.to(S.WAITING)
        if not self._owner.return_to_router(victim, output):
            self.enqueue(victim)
