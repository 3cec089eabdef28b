"""Numbers of items by owner, and the owner with the most."""

from __future__ import annotations


class OwnerCounts:
    """All operations take the same time for any number of owners."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # without owners that have none
        # Owners by how many items they have, without empty sets; the one whose number changed last comes last.
        self._by_count: dict[int, dict[str, None]] = {}
        self.most = 0
        """Items of the owner with the most."""

    def count(self, owner: str) -> int:
        """Items of an owner."""
        return self._counts.get(owner, 0)

    def add(self, owner: str, items: int) -> None:
        """One item, or -1 for one that is gone."""
        self.set(owner, self.count(owner) + items)

    def set(self, owner: str, now: int) -> None:
        """Set an owner's number. It may rise by any number but falls by one only: `most` relies on it."""
        before = self._counts.pop(owner, 0)
        if before:
            owners = self._by_count[before]
            del owners[owner]
            if not owners:
                del self._by_count[before]
        if now:
            self._counts[owner] = now
            self._by_count.setdefault(now, {})[owner] = None
        if now > self.most or self.most not in self._by_count:
            self.most = now

    def last_of_most(self) -> str:
        """The owner with the most items; of several, the one that got or lost an item last. Raises KeyError where none has
        any."""
        return next(reversed(self._by_count[self.most]))

    def first_of_most(self) -> str:
        """The owner with the most items; of several, the one whose number has been the same for longest, so that a
        newcomer is not the first to lose one. Raises KeyError where none has any."""
        return next(iter(self._by_count[self.most]))
