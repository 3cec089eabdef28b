"""Items that wait, of owners who take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")


class _DifferentItems(Generic[T]):
    """As a deque of items that are hashable and different, any of which is found and removed in the same time."""

    def __init__(self) -> None:
        self._items: OrderedDict[T, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def append(self, item: T) -> None:
        self._items[item] = None

    def extend(self, items: Iterable[T]) -> None:
        self._items.update(dict.fromkeys(items))

    def popleft(self) -> T:
        return self._items.popitem(last=False)[0]

    def pop(self) -> T:
        return self._items.popitem()[0]

    def remove(self, item: T) -> None:
        del self._items[item]


_Queue: TypeAlias = deque[T] | _DifferentItems[T]


class RoundRobin(Generic[T]):
    """An owner with many items delays another's by one item; those of each go in the order of arrival.

    All operations take the same time for any number of items and owners, except where it is said.
    """

    def __init__(self) -> None:
        # The owner whose turn is next comes first; none is empty.
        self._waiting: OrderedDict[str, _Queue[T]] = OrderedDict()
        self._items = 0

    def _new_queue(self) -> _Queue[T]:
        return deque()

    def __len__(self) -> int:
        return self._items

    def push(self, owner: str, item: T) -> None:
        """Add an item behind its owner's others; a new owner goes behind all others."""
        queue = self._waiting.get(owner)
        if queue is None:
            queue = self._waiting[owner] = self._new_queue()
        queue.append(item)
        self._items += 1

    def append_all(self, newer: RoundRobin[T]) -> None:
        """Add the items of another, which is not used any more, behind this one's. Looks at each owner of the other."""
        for owner, queue in newer._waiting.items():
            self._waiting.setdefault(owner, self._new_queue()).extend(queue)
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
    """A `RoundRobin` of hashable, different items that finds the owner with the most, in the same time for any number of
    owners. Nor does `remove` look through the owner's items."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[str, int] = {}  # items by owner
        # Owners by how many items they have, without empty sets; the one whose number changed last comes last.
        self._by_count: dict[int, dict[str, None]] = {}
        self._most = 0

    def _new_queue(self) -> _Queue[T]:
        return _DifferentItems()

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
        return self._most if self._by_count else 0

    def count(self, owner: str) -> int:
        """Items of an owner."""
        return self._counts.get(owner, 0)

    def pop_newest_of_most(self) -> T:
        """Remove the newest item of the owner with the most; of several, of the one that got or lost an item last. Raises
        KeyError where none waits."""
        return self._pop_of_most(next(reversed(self._by_count[self._most])), lambda queue: queue.pop())

    def pop_oldest_of_most(self) -> T:
        """Remove the oldest item of the owner with the most; of several, of the one whose number has been the same for
        longest, so that a newcomer is not the first to go. Raises KeyError where none waits."""
        return self._pop_of_most(self._first_of_most(), lambda queue: queue.popleft())

    def oldest_of_most(self) -> T:
        """The item that `pop_oldest_of_most` would remove. Raises KeyError where none waits."""
        return next(iter(self._waiting[self._first_of_most()]))

    def _first_of_most(self) -> str:
        return next(iter(self._by_count[self._most]))

    def _pop_of_most(self, owner: str, take: Callable[[_Queue[T]], T]) -> T:
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
        before, now = self._counts.pop(owner, 0), len(self._waiting.get(owner, ()))
        if before:
            owners = self._by_count[before]
            del owners[owner]
            if not owners:
                del self._by_count[before]
        if now:
            self._counts[owner] = now
            self._by_count.setdefault(now, {})[owner] = None
        # That of one owner has changed: it fell by one, or rose
        if now > self._most or self._most not in self._by_count:
            self._most = now
