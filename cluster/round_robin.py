"""Items that wait, of owners who take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from cluster.owner_counts import OwnerCounts

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """An owner with many items delays another's by one item; those of each go in the order of arrival.

    All operations take the same time for any number of items and owners, except where it is said.
    """

    def __init__(self) -> None:
        # The owner whose turn is next comes first; none is empty.
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()
        self._items = 0

    def __len__(self) -> int:
        return self._items

    def push(self, owner: str, item: T) -> None:
        """Add an item behind its owner's others; a new owner goes behind all others."""
        queue = self._waiting.get(owner)
        if queue is None:
            queue = self._waiting[owner] = deque()
        queue.append(item)
        self._items += 1

    def append_all(self, newer: RoundRobin[T]) -> None:
        """Add the items of another, which is not used any more, behind this one's. Looks at each owner of the other."""
        for owner, queue in newer._waiting.items():
            self._waiting.setdefault(owner, deque()).extend(queue)
        self._items += len(newer)

    def pop(self) -> T:
        """The next item. Its owner's others go behind those of all other owners. Raises KeyError where none waits."""
        owner, queue = self._waiting.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._waiting[owner] = queue
        self._items -= 1
        return item

    def remove(self, owner: str, item: T) -> None:
        """Remove an item; without effect if it does not wait. Looks through its owner's."""
        queue = self._waiting.get(owner)
        if queue is None or item not in queue:
            return
        queue.remove(item)
        if not queue:
            del self._waiting[owner]
        self._items -= 1


class CountedRoundRobin(RoundRobin[T]):
    """A `RoundRobin` that finds the owner with the most items, in the same time for any number of owners."""

    def __init__(self) -> None:
        super().__init__()
        self._counts = OwnerCounts()

    def push(self, owner: str, item: T) -> None:
        super().push(owner, item)
        self._count(owner)

    def append_all(self, newer: RoundRobin[T]) -> None:
        super().append_all(newer)
        for owner in newer._waiting:
            self._count(owner)

    def pop(self) -> T:
        owner = next(iter(self._waiting), "")
        item = super().pop()
        self._count(owner)
        return item

    @property
    def most(self) -> int:
        """Items of the owner with the most."""
        return self._counts.most

    def count(self, owner: str) -> int:
        """Items of an owner."""
        return self._counts.count(owner)

    def pop_newest_of_most(self) -> T:
        """Remove the newest item of the owner with the most; of several, of the one that got or lost an item last. Raises
        KeyError where none waits."""
        return self._pop_of_most(self._counts.last_of_most(), deque.pop)

    def pop_oldest_of_most(self) -> T:
        """Remove the oldest item of the owner with the most; of several, of the one whose number has been the same for
        longest. Raises KeyError where none waits."""
        return self._pop_of_most(self._counts.first_of_most(), deque.popleft)

    def _pop_of_most(self, owner: str, take: Callable[[deque[T]], T]) -> T:
        queue = self._waiting[owner]
        item = take(queue)
        if not queue:
            del self._waiting[owner]
        self._items -= 1
        self._count(owner)
        return item

    def remove(self, owner: str, item: T) -> None:
        super().remove(owner, item)
        self._count(owner)

    def _count(self, owner: str) -> None:
        self._counts.set(owner, len(self._waiting.get(owner, ())))
