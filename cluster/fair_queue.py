"""A queue of requests, shared between tenants by weight.

    tag of a tenant's first request = the tenant's start + tokens / weight        the smallest tag goes first
    start = the tag of the tenant's last turn; at least the virtual time when the tenant begins to wait
    virtual time = the largest tag of a request that was admitted in its order

Self-clocked fair queueing (Golestani, INFOCOM 1994): for two tenants that both have waiting requests, tokens admitted
divided by weight differ by at most each one's largest request divided by its weight. A tenant that is alone gets
everything and is not delayed for it later, and an idle tenant saves up nothing: starts begin at the virtual time.

A tenant's requests wait in the order of their arrival, and only the first has a tag. So a request that leaves without
a turn has cost its tenant nothing, whichever of them it was.

Cost: adding, removing and admitting a request take time logarithmic in the number of waiting tenants, amortised.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field

# Idle ones that are ahead of the virtual time; the one remembered longest is forgotten.
REMEMBERED_TENANTS = 1024
HEAP_SLACK = 64  # entries of requests that have left, beyond as many as tenants wait


@dataclass(eq=False)
class Waiting:
    """One request in a queue. `order` counts arrivals: of tenants with equal tags the older request goes first."""

    tokens: int
    tenant: str
    weight: float
    arrived: float
    order: int
    turn: asyncio.Future[None]
    queued: float = 0.0  # time of its entry into its present queue
    priority: int = 0  # of its present queue


Entry = tuple[float, int, Waiting]  # tag, order, the first request of a tenant


@dataclass(eq=False)
class _Tenant:
    """A tenant that waits."""

    start: float
    since: float  # time of its last turn, or of the request with which it began to wait
    requests: OrderedDict[int, Waiting] = field(default_factory=OrderedDict)  # not empty

    @property
    def first(self) -> Waiting:
        return next(iter(self.requests.values()))

    @property
    def entry(self) -> Entry:
        return (self.start + self.first.tokens / self.first.weight, self.first.order, self.first)


class FairQueue:
    """The waiting requests of one class."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # by `since`
        self._heap: list[Entry] = []  # the first of each tenant, and some that have left
        self._ahead: OrderedDict[str, float] = OrderedDict()  # starts of idle tenants
        self._virtual_time = 0.0
        self._tokens = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tokens(self) -> int:
        """Tokens of all requests in the queue."""
        return self._tokens

    @property
    def first(self) -> Waiting:
        return self._first_entry()[2]

    def earliest(self) -> float | None:
        """Earliest arrival, here or in a lower class; None if no request waits. Linear in the queue's length.

        Any thread: what is iterated over is copied at once, so that requests may enter and leave meanwhile.
        """
        requests = (one for tenant in list(self._tenants.values()) for one in list(tenant.requests.values()))
        return min((one.arrived for one in requests), default=None)

    def take_aged(self, before: float) -> Waiting | None:
        """Remove and return a request that has been in this queue since `before`, of a tenant without a turn here since
        then. It counts as a turn: a tenant's backlog does not rise as a whole, and then stand before its new requests."""
        for tenant in self._tenants.values():
            if tenant.since > before:
                return None
            waiting = tenant.first
            if waiting.queued <= before:
                return self._take(tenant, waiting)
        return None

    def push(self, waiting: Waiting) -> None:
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None:
            start = max(self._virtual_time, self._ahead.pop(waiting.tenant, 0.0))
            tenant = self._tenants[waiting.tenant] = _Tenant(start, self._clock())
        tenant.requests[waiting.order] = waiting
        self._tokens += waiting.tokens
        self._count += 1
        if len(tenant.requests) == 1:
            heapq.heappush(self._heap, tenant.entry)

    def pop(self) -> Waiting:
        entry = self._first_entry()
        self._virtual_time = max(self._virtual_time, entry[0])
        return self._take_turn(entry)

    def pop_others(
        self, tenants: Container[str], takes: Callable[[Waiting], bool] = lambda waiting: True
    ) -> list[Waiting]:
        """Remove and return the first request of each tenant that is not in `tenants`, if `takes` returns True for it.
        `takes` is called in the order of the queue; the order of all others stays.

        Looks at every waiting tenant once."""
        others = [tenant.entry for name, tenant in self._tenants.items() if name not in tenants]
        return [self._take_turn(entry) for entry in sorted(others) if takes(entry[2])]

    def remove(self, waiting: Waiting) -> bool:
        """Remove a request that no longer waits, at no cost to its tenant; returns False if it is not here."""
        tenant = self._tenants.get(waiting.tenant)
        if tenant is None or tenant.requests.get(waiting.order) is not waiting:
            return False
        self._forget(tenant, waiting)
        return True

    def _first_entry(self) -> Entry:
        while not self._is_first(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0]

    def _is_first(self, waiting: Waiting) -> bool:
        tenant = self._tenants.get(waiting.tenant)
        return tenant is not None and tenant.first is waiting

    def _take_turn(self, entry: Entry) -> Waiting:
        tag, _, waiting = entry
        tenant = self._tenants[waiting.tenant]
        tenant.start = tag
        return self._take(tenant, waiting)

    def _take(self, tenant: _Tenant, waiting: Waiting) -> Waiting:
        tenant.since = self._clock()
        self._tenants.move_to_end(waiting.tenant)
        self._forget(tenant, waiting)
        return waiting

    def _forget(self, tenant: _Tenant, waiting: Waiting) -> None:
        was_first = tenant.first is waiting
        del tenant.requests[waiting.order]
        self._tokens -= waiting.tokens
        self._count -= 1
        if not tenant.requests:
            del self._tenants[waiting.tenant]
            self._remember(waiting.tenant, tenant.start)
        elif was_first:
            heapq.heappush(self._heap, tenant.entry)
        if len(self._heap) > 2 * len(self._tenants) + HEAP_SLACK:
            self._heap = [one.entry for one in self._tenants.values()]
            heapq.heapify(self._heap)
        if not self._tenants:
            self._virtual_time = 0.0
            self._heap.clear()
            self._ahead.clear()

    def _remember(self, tenant: str, start: float) -> None:
        """Remember what a tenant that no longer waits has used beyond the virtual time; nothing else of it counts."""
        if start > self._virtual_time:
            self._ahead[tenant] = start
            if len(self._ahead) > REMEMBERED_TENANTS:
                self._ahead.popitem(last=False)

    def check_integrity(self) -> None:
        requests = [one for tenant in self._tenants.values() for one in tenant.requests.values()]
        assert (self._count, self._tokens) == (len(requests), sum(one.tokens for one in requests))
        assert all(tenant.requests for tenant in self._tenants.values())
        assert {tenant.entry for tenant in self._tenants.values()} <= set(self._heap)
        times = [tenant.since for tenant in self._tenants.values()]
        assert times == sorted(times)
        assert len(self._heap) <= 2 * len(self._tenants) + HEAP_SLACK
        assert len(self._ahead) <= REMEMBERED_TENANTS and not self._ahead.keys() & self._tenants.keys()
