"""Which running sequences take part in a step whose token budget does not cover all of them.

Hand-offs and further choices join the running batch without a limit, so those of one tenant may exceed the budget. Then
every tenant's first sequence comes before every tenant's second one, and so on, by weight: a tenant whose sequences are
within its share takes part in every step. Within a tenant the one left out longest is first. What a tenant has had beyond
its share carries over from step to step (start-time fair queueing): many heavier tenants leave a lighter one its steps.

A higher class comes first; a tenant that has had no step in a class for AGING_STEPS counts there as of the next higher
one, and again after as many. Sequences do not age by their own wait: most of a tenant's large backlog waits behind its
own sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import HIGHEST_RANK, Sequence

AGING_STEPS = 64
KEPT_FOR_PROMPTS = 4  # a step whose budget does not cover all keeps this part of it, a quarter, for prompts


class Turns:
    def __init__(self) -> None:
        self._keeps = 0  # steps that have kept a part of their budget
        self._step = 0  # of those whose budget does not cover all
        # By tenant and class: the last of these steps that it took part in
        self._last: dict[tuple[str, int], int] = {}
        # (of those present only), and what it has had beyond the one, of those left out, that has had least
        self._ahead: dict[tuple[str, int], float] = {}

    def kept(self, budget: int) -> int:
        """What a step keeps for prompts: a quarter, and of a budget below four a token in some of the steps."""
        self._keeps += 1
        return self._keeps * budget // KEPT_FOR_PROMPTS - (self._keeps - 1) * budget // KEPT_FOR_PROMPTS

    def all_covered(self) -> None:
        """A step has covered all: nothing is left of what tenants had before it."""
        self._last.clear()
        self._ahead.clear()

    def order(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Those that may be in the step, first turn first."""
        self._step += 1
        present = {(s.request.tenant, s.rank) for s in sequences}
        self._last = {one: self._last.get(one, self._step - 1) for one in present}
        ranks = {
            (tenant, rank): max(HIGHEST_RANK, rank - (self._step - last - 1) // AGING_STEPS)
            for (tenant, rank), last in self._last.items()
        }
        taken: Counter[str] = Counter()
        turns: dict[Sequence, tuple[int, float]] = {}
        for s in sorted(sequences, key=lambda s: (ranks[s.request.tenant, s.rank], -s.left_out, s.arrival)):
            one = (s.request.tenant, s.rank)
            taken[s.request.tenant] += 1
            turns[s] = (ranks[one], self._ahead.get(one, 0.0) + taken[s.request.tenant] / s.request.weight)
        return sorted(turns, key=lambda s: turns[s])

    def taken(self, sequences: Seq[Sequence], scheduled: Container[Sequence]) -> None:
        """Record which of `sequences` the step computes."""
        had, least = dict(self._ahead), dict[int, float]()
        for s in sequences:
            one = (s.request.tenant, s.rank)
            s.left_out = 0 if s in scheduled else s.left_out + 1
            if not s.left_out:
                self._last[one] = self._step
                had[one] = had.get(one, 0.0) + 1 / s.request.weight
        # Against tenants that were left something: beside others that want no more, what one takes is no debt.
        for s in sequences:
            if s.left_out:
                used = had.get((s.request.tenant, s.rank), 0.0)
                least[s.rank] = min(used, least.get(s.rank, used))
        self._ahead = {
            one: used - least[one[1]] for one, used in had.items() if one[1] in least and used > least[one[1]]
        }
