"""A queue of requests, shared between tenants by weight.

    tag = max(virtual time, the tenant's last tag) + tokens / weight        the smallest tag goes first
    virtual time = the tag of the last request that was admitted

Self-clocked fair queueing (Golestani, INFOCOM 1994): for two tenants that both have waiting requests, tokens admitted
divided by weight differ by at most each one's largest request divided by its weight. A tenant that is alone gets
everything and is not delayed for it later: tags begin at the virtual time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass


@dataclass(eq=False)
class Waiting:
    """One request in a queue. `order` counts arrivals: of requests with equal tags the older goes first."""

    tokens: int
    tenant: str
    weight: float
    arrived: float
    order: int
    turn: asyncio.Future[None]
    tag: float = 0.0
    queued: float = 0.0  # time of its entry into its present queue
    priority: int = 0  # of its present queue

    def __lt__(self, other: Waiting) -> bool:
        return (self.tag, self.order) < (other.tag, other.order)


class FairQueue:
    """The waiting requests of one class."""

    def __init__(self) -> None:
        self._heap: list[Waiting] = []
        self._by_arrival: dict[int, Waiting] = {}
        self._virtual_time = 0.0
        self._tokens = 0
        self._last_tags: dict[str, float] = {}  # of tenants ahead of the virtual time: what they have used
        self._waiting: Counter[str] = Counter()  # requests by tenant

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def tokens(self) -> int:
        """Tokens of all requests in the queue."""
        return self._tokens

    @property
    def first(self) -> Waiting:
        return self._heap[0]

    @property
    def earliest(self) -> float:
        """Earliest arrival, here or in a lower class. Linear in the queue's length."""
        return min(one.arrived for one in self._heap)

    @property
    def oldest(self) -> Waiting:
        """The request that has been in this queue longest."""
        return next(iter(self._by_arrival.values()))

    def push(self, waiting: Waiting) -> None:
        start = max(self._virtual_time, self._last_tags.get(waiting.tenant, 0.0))
        waiting.tag = self._last_tags[waiting.tenant] = start + waiting.tokens / waiting.weight
        heapq.heappush(self._heap, waiting)
        self._by_arrival[waiting.order] = waiting
        self._waiting[waiting.tenant] += 1
        self._tokens += waiting.tokens

    def pop(self) -> Waiting:
        waiting = heapq.heappop(self._heap)
        self._virtual_time = waiting.tag
        self._forget(waiting)
        return waiting

    def pop_other(self, tenants: Container[str]) -> Waiting | None:
        """Remove and return the first request of a tenant that is not in `tenants`; the others keep their order."""
        if all(tenant in tenants for tenant in self._waiting):
            return None
        found = min((one for one in self._heap if one.tenant not in tenants), default=None)
        if found is not None:
            self._take(found)
        return found

    def remove(self, waiting: Waiting) -> bool:
        """Remove a request that no longer waits; returns False if it is not here. Its tenant's tag moves back, unless
        later requests of the tenant wait."""
        if self._by_arrival.get(waiting.order) is not waiting:
            return False
        if self._last_tags[waiting.tenant] == waiting.tag:
            self._last_tags[waiting.tenant] -= waiting.tokens / waiting.weight
        self._take(waiting)
        return True

    def _take(self, waiting: Waiting) -> None:
        """Remove a request from any position."""
        self._heap.remove(waiting)
        heapq.heapify(self._heap)
        self._forget(waiting)

    def _forget(self, waiting: Waiting) -> None:
        del self._by_arrival[waiting.order]
        self._tokens -= waiting.tokens
        self._waiting[waiting.tenant] -= 1
        if not self._waiting[waiting.tenant]:
            del self._waiting[waiting.tenant]
        # A tag behind the virtual time says nothing more, unless the tenant's next request leaves the queue by it.
        if waiting.tenant not in self._waiting and self._last_tags[waiting.tenant] <= self._virtual_time:
            del self._last_tags[waiting.tenant]
        if not self._heap:
            self._virtual_time = 0.0
            self._last_tags.clear()

    def check_integrity(self) -> None:
        assert {id(one) for one in self._heap} == {id(one) for one in self._by_arrival.values()}
        assert self._tokens == sum(one.tokens for one in self._heap)
        assert Counter(one.tenant for one in self._heap) == self._waiting
        assert set(self._waiting) <= set(self._last_tags)
        assert all(one.tag >= self._virtual_time for one in self._heap)
