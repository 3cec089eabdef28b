"""The blocks of sequences: what they take and release, what tenants hold of them, and what is free for newcomers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

from engine.cache.block_pool import BlockPool
from engine.plan import BlockCopy
from engine.request import EngineRequest
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.prefix_cache import PrefixCache
from engine.scheduler.refusals import Refusal
from engine.scheduler.sequence import Sequence
from engine.scheduler.shares import Shares

Claimant: TypeAlias = Sequence | Refusal


class Blocks:
    def __init__(self, pool: BlockPool, prefixes: PrefixCache, claims: GrowthClaims):
        self._pool = pool
        self._prefixes = prefixes
        self._claims = claims
        self._page = prefixes.page_size
        self.shares = Shares(pool.charged)

    def begin_step(self) -> None:
        self._claims.begin_step()
        self.shares.begin_step()

    def count(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self._page)

    def tokens(self, count: int) -> int:
        """Tokens that so many blocks hold."""
        return count * self._page

    def needs(self, waiting: Sequence) -> tuple[list[int], int]:
        """The cached blocks that a waiting sequence takes, and the number of all that it needs."""
        tokens = len(waiting.tokens)
        if waiting.needs_each_position:
            return [], self.count(tokens)
        return self._prefixes.match(waiting.hashes[: (tokens - 1) // self._page]), self.count(tokens)

    def least_need(self, waiting: Sequence) -> int:
        """How many it needs beside cached ones at least, as it found no more of these at its last look. 0: not known."""
        tokens, found, hashes = len(waiting.tokens), waiting.found, waiting.hashes
        if found is None or (
            found < min(len(hashes), (tokens - 1) // self._page) and self._prefixes.holds(hashes[found])
        ):
            return 0
        return self.count(tokens) - found

    def allocate(self, sequence: Sequence, held: list[int], total: int) -> None:
        """`total` blocks, of which the prefix cache holds the first ones, `held`."""
        tenant = sequence.request.tenant
        self._pool.retain(held, tenant)
        sequence.blocks = held + self._pool.allocate(total - len(held), tenant)
        sequence.cached_tokens = len(held) * self._page
        sequence.registered_blocks = len(held)
        self.shares.grew(tenant)

    def wanted(self, sequence: Sequence, tokens: int) -> int:
        """How many a running sequence takes for its first `tokens` tokens: one more if it writes to a shared block."""
        blocks = sequence.blocks
        more, tail = -(-tokens // self._page) - len(blocks), sequence.num_computed // self._page
        shared = tail < len(blocks) and self._pool.shared(blocks[tail])
        return (more if more > 0 else 0) + shared

    def grow(self, sequence: Sequence, tokens: int) -> BlockCopy | None:
        """Allocate blocks for the first `tokens` tokens. A shared block that is written to is replaced by a copy, which is
        to be made."""
        copy, tail, tenant = None, sequence.num_computed // self._page, sequence.request.tenant
        if tail < len(sequence.blocks) and self._pool.shared(sequence.blocks[tail]):
            copy = BlockCopy(sequence.blocks[tail], *self._pool.allocate(1, tenant))
            self._pool.free([copy.source])
            sequence.blocks[tail] = copy.target
        if (more := self.count(tokens) - len(sequence.blocks)) > 0:
            sequence.blocks.extend(self._pool.allocate(more, tenant))
        self.shares.grew(tenant)
        return copy

    def shrink(self, sequence: Sequence, count: int) -> None:
        """Free all blocks but the first `count`."""
        self._pool.free(sequence.blocks[count:])
        del sequence.blocks[count:]
        sequence.blocks_in_row = min(sequence.blocks_in_row, len(sequence.blocks))

    def release(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        sequence.blocks = []

    def of_hand_off(self, request: EngineRequest, max_tokens: int, held: int) -> tuple[int, int]:
        """The blocks of its first choice, and those that it needs beside the cached ones `held`, with the growth of its
        further choices. That is a projection: it alone is no reason to wait for more than half of the cache."""
        total = self.count(max_tokens)
        growth = total - (len(request.prompt_tokens) + len(request.output_tokens)) // self._page
        further = min(growth * (request.n - 1), max(0, self._pool.total // 2 - total))
        return total, total - held + further

    # --- for newcomers -----------------------------------------------------------------------------------

    def free(self, held: list[int]) -> int:
        """Beside the cached ones `held`."""
        return self._pool.num_free - self._pool.free_among(held)

    def claim(self, waiting: Sequence) -> int:
        """How many of the free ones a waiting sequence needs."""
        held, total = self.needs(waiting)
        return total - len(held) + self._pool.free_among(held)

    def room(
        self,
        need: int,
        free: int,
        request: EngineRequest,
        rank: int,
        refusals: Iterable[tuple[Refusal, int]],
        waiting: Iterable[Sequence],
        most: int,
    ) -> int:
        """How many of `free` blocks a newcomer of class `rank` that needs `need` may take: those that neither running
        sequences nor `refusals` or `waiting` ones of its class or a higher one claim.

        A claim does not count against a newcomer of its class whose tenant holds no more for its weight, with what the
        newcomer takes, than the tenant of the claim. Not all claims are looked at if some leave too little, or if those of
        `waiting` leave enough were they `most`, which they do not exceed.
        """
        room = free
        share = self.shares.of(request, need + self._pool.num_free - free)

        def counts(one: Claimant) -> bool:
            return one.rank < rank or (one.rank == rank and self.shares.of(one.request) < share)

        numbers: Iterable[tuple[Claimant, int]] = chain(self._claims.of(rank).items(), refusals)
        for count in (count for one, count in numbers if counts(one)):
            if room < need:
                return room
            room -= count
        if room - most >= need:
            return room
        for one in waiting:
            if room < need:
                break
            if counts(one):
                room -= self.claim(one)
        return room
