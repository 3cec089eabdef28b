"""Waiting sequences count as of a higher class after a long wait, so that no class starves another.

One of each tenant and class rises in each AGING_SECONDS, and only if the tenant has had no turn in that class meanwhile: a
backlog, as of preempted streams, waits behind its own tenant's sequences and would come before those of others as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf

from engine.scheduler.sequence import HIGHEST_RANK, Sequence, rank_of

AGING_SECONDS = 30.0
LOOKS = 32  # in AGING_SECONDS

Kind = tuple[str, int]  # tenant and class
Clock = Callable[[], float]  # monotonic seconds


class Aging:
    def __init__(self, clock: Clock):
        self.clock = clock
        self._last_look = -inf
        self._turns: dict[Kind, float] = {}  # the last one, of those with waiting sequences

    def rise(self, waiting: Seq[Sequence]) -> bool:
        """Raise those whose time has come, of sequences in their order; returns whether there were some."""
        now = self.clock()
        if now - self._last_look < AGING_SECONDS / LOOKS:
            return False
        self._last_look = now
        first: dict[Kind, Sequence] = {}
        for one in waiting:
            if not one.paused and one.rank > HIGHEST_RANK:
                first.setdefault((one.request.tenant, one.rank), one)
        self._turns = {kind: turn for kind, turn in self._turns.items() if kind in first}
        due = [
            (kind, one)
            for kind, one in first.items()
            if now - max(one.waits_since, self._turns.get(kind, one.waits_since)) >= AGING_SECONDS
        ]
        for kind, one in due:
            self._turns[kind] = one.waits_since = now
            one.set_rank(one.rank - 1)
        return bool(due)

    def admitted(self, sequence: Sequence) -> None:
        """It has its turn, in its own class and in the one that it has risen to."""
        now = self.clock()
        for rank in (sequence.rank, rank_of(sequence.request.priority)):
            self._turns[sequence.request.tenant, rank] = now
