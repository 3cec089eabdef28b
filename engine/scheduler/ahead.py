"""Claims to free blocks that come before a waiting sequence, while a step admits some.

Sequences are admitted in order of class and arrival. A claim that comes before one comes before all later ones too, so a
running sum is enough. Single claims are looked at only if their sum leaves too few blocks, beginning with the tenants that
hold most.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable

from engine.cache.block_pool import BlockPool
from engine.request import EngineRequest
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.refusals import Refusal
from engine.scheduler.sequence import Sequence
from engine.scheduler.shares import Shares


class Ahead:
    """`refusals`: in order of class and arrival, with the blocks that each claims."""

    def __init__(
        self, pool: BlockPool, shares: Shares, growth: GrowthClaims, refusals: Iterable[tuple[Refusal, int]]
    ):
        self._pool = pool
        self._shares = shares
        self._growth = growth
        self._refusals = deque(refusals)
        self._waiting = 0  # blocks claimed by refused hand-offs and by sequences that were passed
        self._growing = 0  # and by running ones
        self._rank: int | None = None  # of the last sequence
        # Claims of this class: what the tenant holds for its weight, most first, and the claimed blocks.
        self._equal: list[tuple[float, int]] = []
        self._new: list[tuple[EngineRequest, int]] = []  # not yet among them
        self._entries: defaultdict[str, list[tuple[EngineRequest, tuple[float, int]]]] = defaultdict(list)

    def room(self, sequence: Sequence, need: int, free: int) -> int:
        """How many of `free` blocks the sequence may take: those that no other claims (`Blocks.room`)."""
        self._advance(sequence)
        room = free - self._waiting - self._growing
        if need <= room or need > free:
            return room
        share = self._shares.of(sequence.request, need + self._pool.num_free - free)
        for request, count in self._new:
            entry = -self._shares.of(request), count
            insort(self._equal, entry)
            self._entries[request.tenant].append((request, entry))
        self._new.clear()
        for negative, count in self._equal:
            if need <= room or -negative < share:
                break
            room += count
        return room

    def passed(self, sequence: Sequence, count: int) -> None:
        """The sequence waits for blocks, of which it claims `count`."""
        self._advance(sequence)
        self._waiting += count
        self._new.append((sequence.request, count))

    def admitted(self, tenant: str) -> None:
        """A sequence of the tenant was admitted, so the tenant holds more blocks than before."""
        for request, entry in self._entries.pop(tenant, ()):
            del self._equal[bisect_left(self._equal, entry)]
            self._new.append((request, entry[1]))

    def _advance(self, sequence: Sequence) -> None:
        if sequence.rank != self._rank:
            self._rank = sequence.rank
            self._equal.clear()
            self._new.clear()
            self._entries.clear()
            growing = self._growth.of(sequence.rank)
            self._growing = sum(growing.values())
            for one, count in growing.items():
                if one.rank == self._rank:
                    self._new.append((one.request, count))
        while self._refusals and (first := self._refusals[0][0]).order < sequence.order:
            count = self._refusals.popleft()[1]
            self._waiting += count
            if first.rank == self._rank:
                self._new.append((first.request, count))
