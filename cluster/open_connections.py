"""The open connections of a port that anyone may connect to, as a bounded number that addresses share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

from cluster.round_robin import CountedRoundRobin

T = TypeVar("T")


class OpenConnections(Generic[T]):
    """At most `limit` connections. For one too many the oldest of the address with the most is evicted, so that a flood
    from one address closes its own. The oldest, because exchanges on such ports are short: silent connections must not
    keep out later ones of their own address, which may be that of many clients."""

    def __init__(self, limit: float = math.inf):
        """Without a `limit`, only the owner evicts."""
        self.limit = limit
        self._by_address: CountedRoundRobin[T] = CountedRoundRobin()
        self._address: dict[T, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._address)

    def __iter__(self) -> Iterator[T]:
        return iter(self._address)

    def __contains__(self, connection: T) -> bool:
        return connection in self._address

    @property
    def most(self) -> int:
        """Connections of the address with the most."""
        return self._by_address.most

    def count(self, address: str) -> int:
        """Connections of an address."""
        return self._by_address.count(address)

    def add(self, connection: T, address: str) -> T | None:
        """Returns the connection to be closed, which is no longer counted, if there are too many."""
        self._address[connection] = address
        self._by_address.push(address, connection)
        return self.evict_oldest() if len(self) > self.limit else None

    def oldest_of_most(self) -> T:
        """The oldest connection of the address with the most. Raises KeyError where there is none."""
        return self._by_address.oldest_of_most()

    def evict_oldest(self) -> T:
        """Remove the oldest connection of the address with the most. Raises KeyError where there is none."""
        return self._removed(self._by_address.pop_oldest_of_most())

    def evict_newest(self) -> T:
        """Remove the newest connection of the address with the most. Raises KeyError where there is none."""
        return self._removed(self._by_address.pop_newest_of_most())

    def _removed(self, connection: T) -> T:
        del self._address[connection]
        return connection

    def discard(self, connection: T) -> None:
        """Count a connection no longer; without effect on one that is not counted."""
        address = self._address.pop(connection, None)
        if address is not None:
            self._by_address.remove(address, connection)
