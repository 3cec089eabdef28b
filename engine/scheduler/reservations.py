"""Reservations whose KV is on its way, and which of them running sequences may evict.

An evicted one keeps its blocks until the worker aborts it, after the last write to them has ended. No other is evicted
meanwhile.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S
from engine.scheduler.shares import Shares


class Reservations:
    def __init__(self) -> None:
        self._reserved: dict[Sequence, None] = {}
        self._evicted: set[Sequence] = set()
        self._none_for: set[tuple[str, int]] = set()  # tenants and classes that found none in this step

    def begin_step(self) -> None:
        self._none_for.clear()

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
        kind = (growing.request.tenant, growing.rank)
        if kind in self._none_for:
            return None
        share = shares.of(growing.request)
        candidates = [
            one
            for one in self._reserved
            if one.rank > growing.rank or (one.rank == growing.rank and shares.of(one.request) >= share)
        ]
        if not candidates:
            self._none_for.add(kind)
            return None
        lowest = max(one.rank for one in candidates)
        victim = shares.choose(one for one in candidates if one.rank == lowest)
        victim.machine.to(S.EVICTED)
        del self._reserved[victim]
        self._evicted.add(victim)
        return victim
