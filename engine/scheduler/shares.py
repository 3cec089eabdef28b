"""Blocks that tenants hold for their weight, and which sequence gives up its own when they are short."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import attrgetter

from engine.request import EngineRequest
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S


class Shares:
    """Tenants' shares of the blocks in use. `blocks`: by tenant; a caller that adds to them calls `grew`."""

    def __init__(self, blocks: Mapping[str, int]):
        self._blocks = blocks
        self._orders: list[ByShare] = []  # of the present step

    def begin_step(self) -> None:
        self._orders.clear()

    def of(self, request: EngineRequest, more: float = 0) -> float:
        """Blocks of the request's tenant, with `more`, divided by its weight."""
        return (self._blocks.get(request.tenant, 0) + more) / request.weight

    def order(self, ones: Iterable[Sequence], state: S) -> ByShare:
        """For the present step."""
        self._orders.append(ByShare(ones, state, self))
        return self._orders[-1]

    def grew(self, tenant: str) -> None:
        for order in self._orders:
            order.changed(tenant)


# What the tenant holds, divided by its weight, and the arrival of its youngest, both negative; the tenant.
Entry = tuple[float, int, str]


class ByShare:
    """Sequences in one state. First is the youngest of the tenant that holds most; of tenants with equal shares the
    youngest of them all. Those that have left the state are skipped.

    A heap of tenants. One that holds less than its entry says gets a new entry once it comes first; one that may come
    earlier than its entry says is told by `changed`. So a choice costs time logarithmic in the number of tenants.
    """

    def __init__(self, ones: Iterable[Sequence], state: S, shares: Shares):
        self._state = state
        self._shares = shares
        self._tenants: dict[str, list[Sequence]] = {}  # the youngest last
        for one in sorted(ones, key=attrgetter("arrival")):
            self._tenants.setdefault(one.request.tenant, []).append(one)
        self._entries: dict[str, Entry] = {}  # the valid one of each tenant
        self._heap: list[Entry] = []
        self._changed = dict.fromkeys(self._tenants)

    def changed(self, tenant: str) -> None:
        """The tenant holds more, or another one of its sequences is its youngest."""
        if tenant in self._tenants:
            self._changed[tenant] = None

    def first(self) -> Sequence | None:
        for tenant in self._changed:
            self._renew(tenant)
        self._changed.clear()
        while self._heap:
            entry = self._heap[0]
            tenant = entry[2]
            valid = self._entries.get(tenant) is entry
            if valid and self._entry(tenant) == entry:
                return self._tenants[tenant][-1]
            heapq.heappop(self._heap)
            if valid:
                self._renew(tenant)
        return None

    def pop(self) -> Sequence | None:
        """Remove and return the first."""
        one = self.first()
        if one is not None:
            self._tenants[one.request.tenant].pop()
            self.changed(one.request.tenant)
        return one

    def _entry(self, tenant: str) -> Entry | None:
        ones = self._tenants[tenant]
        while ones and ones[-1].state is not self._state:
            ones.pop()
        return (-self._shares.of(ones[-1].request), -ones[-1].arrival, tenant) if ones else None

    def _renew(self, tenant: str) -> None:
        entry = self._entry(tenant)
        if entry is None:
            self._entries.pop(tenant, None)
        elif self._entries.get(tenant) != entry:
            self._entries[tenant] = entry
            heapq.heappush(self._heap, entry)


class Victims:
    """Which running sequences are preempted in one step: of the lowest class, the youngest of the tenant that holds most.

    A sequence without a token since it was preempted last is spared while there are others of its class: between two
    preemptions it makes progress. Among such ones alone the youngest is chosen, whatever its tenant holds, so that the
    oldest goes on.
    """

    def __init__(self, running: Iterable[Sequence], shares: Shares):
        others: defaultdict[int, list[Sequence]] = defaultdict(list)
        self._spared: defaultdict[int, list[Sequence]] = defaultdict(list)  # by class, the youngest last
        for one in running:
            spared = one.preempted_at == len(one.tokens)
            (self._spared if spared else others)[one.rank].append(one)
        for ones in self._spared.values():
            ones.sort(key=attrgetter("arrival"))
        self._others = {rank: shares.order(ones, S.RUNNING) for rank, ones in others.items()}

    def next(self) -> Sequence:
        """Each is chosen once. There is one left: the sequence that lacks blocks runs itself."""
        for rank in sorted(self._others.keys() | self._spared.keys(), reverse=True):
            if rank in self._others and (victim := self._others[rank].pop()) is not None:
                return victim
            spared = self._spared[rank]
            while spared:
                if (victim := spared.pop()).state is S.RUNNING:
                    return victim
        raise AssertionError("no sequence runs")
