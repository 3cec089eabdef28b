"""Which running sequences take part in a step whose token budget does not cover all of them.

Hand-offs and further choices join the running batch without a limit, so those of one tenant may exceed the budget. Then
every tenant's first sequence comes before every tenant's second one, and so on, by weight: a tenant whose sequences are
within its share takes part in every step. Within a tenant the one left out longest is first. What a tenant has had beyond
its share carries over from step to step (start-time fair queueing): many heavier tenants leave a lighter one its steps.

A higher class comes first; a tenant that has had no step in a class for AGING_STEPS counts there as of the next higher
one, and again after as many. Sequences do not age by their own wait: most of a tenant's large backlog waits behind its
own sequences.

Sequences are many more than a step has tokens: 16,384 of one key. So each is looked at once in a step, and the order of
tenants is made only as far as the step takes it.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from engine.scheduler.sequence import HIGHEST_RANK, Sequence

AGING_STEPS = 64
KEPT_FOR_PROMPTS = 4  # a step whose budget does not cover all keeps this part of it, a quarter, for prompts


Kind = tuple[str, int]  # tenant and class
Groups = dict[Kind, list[Sequence]]


def singles_and_chunks(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Sequences that lack one token, and those that lack several; without those that rest."""
    singles, chunks = list[Sequence](), list[Sequence]()
    for s in running:
        if not (s.paused or s.awaits_mask):
            (singles if len(s.tokens) - s.num_computed == 1 else chunks).append(s)
    return singles, chunks


class Turns:
    def __init__(self) -> None:
        self._keeps = 0  # steps that have kept a part of their budget
        self._step = 0  # of those whose budget does not cover all
        # By tenant and class: the last of these steps that it took part in
        self._last: dict[Kind, int] = {}
        # (of those present only), and what it has had beyond the one, of those left out, that has had least
        self._ahead: dict[Kind, float] = {}
        self._present: Counter[Kind] = Counter()  # sequences in the present step's order

    def kept(self, budget: int) -> int:
        """Tokens that the next step keeps for prompts: a quarter; of a budget below four, one in some of the steps."""
        self._keeps += 1
        return self._keeps * budget // KEPT_FOR_PROMPTS - (self._keeps - 1) * budget // KEPT_FOR_PROMPTS

    def all_covered(self) -> None:
        """A step has covered all: nothing is left of what tenants had before it."""
        self._last.clear()
        self._ahead.clear()

    def order(self, *lists: Seq[Sequence]) -> list[Iterator[Sequence]]:
        """The sequences of each list that may be in the step, first turn first."""
        self._step += 1
        groups = [self._group(one) for one in lists]
        self._present = Counter()
        for one in groups:
            self._present.update({kind: len(group) for kind, group in one.items()})
        self._last = {kind: self._last.get(kind, self._step - 1) for kind in self._present}
        return [self._merge(one) for one in groups]

    def _group(self, sequences: Seq[Sequence]) -> Groups:
        groups: Groups = defaultdict(list)
        for s in sequences:
            groups[s.request.tenant, s.rank].append(s)
            if s.turn is None:
                s.turn = (self._step - 1, s.arrival)
        return groups

    def _merge(self, groups: Groups) -> Iterator[Sequence]:
        levels: defaultdict[int, defaultdict[str, list[Sequence]]] = defaultdict(lambda: defaultdict(list))
        for kind, group in groups.items():
            tenant, rank = kind
            aged = max(HIGHEST_RANK, rank - (self._step - self._last[kind] - 1) // AGING_STEPS)
            levels[aged][tenant] += group
        taken: Counter[str] = Counter()
        for _, tenants in sorted(levels.items()):
            yield from self._by_share(tenants, taken)

    def _by_share(self, tenants: dict[str, list[Sequence]], taken: Counter[str]) -> Iterator[Sequence]:
        """The sequences of one class. `taken`: turns of higher classes; those of this one are added."""

        def entry(
            s: Sequence, rest: Iterator[Sequence]
        ) -> tuple[float, object, int, Sequence, Iterator[Sequence]]:
            tenant = s.request.tenant
            taken[tenant] += 1
            used = self._ahead.get((tenant, s.rank), 0.0) + taken[tenant] / s.request.weight
            return used, s.turn, id(s), s, rest

        for group in tenants.values():
            group.sort(key=attrgetter("turn"))
        heap = [entry(next(rest), rest) for rest in map(iter, tenants.values())]
        heapq.heapify(heap)
        while heap:
            _, _, _, s, rest = heap[0]
            yield s
            following = next(rest, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, entry(following, rest))

    def taken(self, scheduled: Iterable[Sequence]) -> None:
        """Record which sequences the step computes. Those that were in no order have joined in it."""
        had, least, left_out = dict(self._ahead), dict[int, float](), self._present.copy()
        for s in scheduled:
            if s.turn is not None:
                kind = (s.request.tenant, s.rank)
                self._last[kind] = self._step
                had[kind] = had.get(kind, 0.0) + 1 / s.request.weight
                left_out[kind] -= 1
            s.turn = (self._step, s.arrival)
        # Against tenants that were left something: beside others that want no more, what one takes is no debt.
        for kind in +left_out:
            used = had.get(kind, 0.0)
            least[kind[1]] = min(used, least.get(kind[1], used))
        self._ahead = {
            one: used - least[one[1]] for one, used in had.items() if one[1] in least and used > least[one[1]]
        }
