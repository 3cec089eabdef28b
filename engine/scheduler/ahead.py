"""Claims to free blocks that come before a waiting sequence, while a step admits some.

They ask in order of class and arrival. A claim before one is before all later ones too, so a running sum is
enough.
Single claims are looked at only if all together leave too little, and then those of the tenants that hold most.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable

from engine.cache.block_pool import BlockPool
from engine.request import EngineRequest
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.refusals import Refusal
from engine.scheduler.sequence import Sequence
from engine.scheduler.shares import Shares


class Ahead:
    """`refusals`: in their order, with the blocks that each has a claim to."""

    def __init__(
        self, pool: BlockPool, shares: Shares, growth: GrowthClaims, refusals: Iterable[tuple[Refusal, int]]
    ):
        self._pool = pool
        self._shares = shares
        self._growth = growth
        self._refusals = deque(refusals)
        self._waiting = 0  # blocks claimed by refused hand-offs and by sequences that were passed
        self._growing = 0  # and by running ones
        self._rank: int | None = None  # of the last that asked
        # Of this class: what the tenant holds for its weight, most first, and the claim.
        self._equal: list[tuple[float, int]] = []
        self._new: list[tuple[EngineRequest, int]] = []  # not yet among them
        self._tenants: dict[str, list[tuple[EngineRequest, int]]] = {}

    def room(self, sequence: Sequence, held: list[int], need: int) -> int:
        """Blocks available to it, of those to which no other has a claim (`Blocks.room`)."""
        self._advance(sequence)
        free = self._pool.num_free - self._pool.free_among(held)
        room = free - self._waiting - self._growing
        if need <= room or need > free:
            return room
        share = self._shares.of(sequence.request, need + self._pool.num_free - free)
        for request, count in self._new:
            insort(self._equal, (-self._shares.of(request), count))
        self._new.clear()
        for negative, count in self._equal:
            if need <= room or -negative < share:
                break
            room += count
        return room

    def passed(self, sequence: Sequence, count: int) -> None:
        """It waits for blocks: `count` are its claim."""
        self._advance(sequence)
        self._waiting += count
        self._add(sequence.request, count)

    def admitted(self, tenant: str) -> None:
        """Its tenant holds more than before."""
        if tenant in self._tenants:
            self._new.clear()
            self._equal = sorted(
                (-self._shares.of(request), count)
                for claims in self._tenants.values()
                for request, count in claims
            )

    def _advance(self, sequence: Sequence) -> None:
        if sequence.rank != self._rank:
            self._rank = sequence.rank
            self._equal.clear()
            self._new.clear()
            self._tenants.clear()
            growing = self._growth.of(sequence.rank)
            self._growing = sum(growing.values())
            for one, count in growing.items():
                if one.rank == self._rank:
                    self._add(one.request, count)
        while self._refusals and (first := self._refusals[0][0]).order < sequence.order:
            count = self._refusals.popleft()[1]
            self._waiting += count
            if first.rank == self._rank:
                self._add(first.request, count)

    def _add(self, request: EngineRequest, count: int) -> None:
        self._new.append((request, count))
        self._tenants.setdefault(request.tenant, []).append((request, count))
