"""Reservations whose KV is on its way, and which of them running sequences may evict.

An evicted one keeps its blocks until the worker aborts it, after the last write to them has ended. No other is evicted
meanwhile.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.shares import ByShare, Shares


class Reservations:
    def __init__(self) -> None:
        self._reserved: dict[Sequence, None] = {}
        self._evicted: set[Sequence] = set()
        # Those of the lowest class, of the present step; None until one is to be evicted.
        self._lowest: ByShare | None = None

    def __len__(self) -> int:
        """The number of reservations that may be evicted."""
        return len(self._reserved)

    def begin_step(self) -> None:
        self._lowest = None

    @property
    def eviction_pending(self) -> bool:
        """Whether an evicted reservation has not been aborted yet."""
        return bool(self._evicted)

    def add(self, sequence: Sequence) -> None:
        self._reserved[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        self._reserved.pop(sequence, None)
        self._evicted.discard(sequence)

    def evict(self, growing: Sequence, shares: Shares) -> Sequence | None:
        """Evict the youngest of the lowest class, and in it of the tenant that holds most. None if there is none that
        `growing` may evict: of a lower class; or of its own, unless the tenant holds less than that of `growing`."""
        if not len(self):
            return None
        if self._lowest is None:
            rank = max(one.rank for one in self._reserved)
            self._lowest = shares.order((one for one in self._reserved if one.rank == rank), S.WAITING_FOR_KV)
        victim = self._lowest.first()
        if victim is None or victim.rank < growing.rank:
            return None
        if victim.rank == growing.rank and shares.of(victim.request) < shares.of(growing.request):
            return None
        victim.machine.to(S.EVICTED)
        del self._reserved[victim]
        self._evicted.add(victim)
        return victim
