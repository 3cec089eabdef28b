"""The open connections of a port that anyone may connect to, as a bounded number that addresses share."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from cluster.owner_counts import OwnerCounts

T = TypeVar("T")


class OpenConnections(Generic[T]):
    """At most `limit` connections. For one too many the oldest of the address with the most is evicted, so that a flood
    from one address closes its own. The oldest, because exchanges on such ports are short: silent connections must not
    keep out later ones of their own address, which may be that of many clients."""

    def __init__(self, limit: float = math.inf):
        """Without a `limit`, only the owner evicts."""
        self.limit = limit
        self._address: dict[T, str] = {}  # oldest first
        # Oldest first. A dict would look at all that have left before it finds the oldest.
        self._by_address: dict[str, OrderedDict[T, None]] = {}
        self._counts = OwnerCounts()

    def __len__(self) -> int:
        return len(self._address)

    def __iter__(self) -> Iterator[T]:
        return iter(self._address)

    def __contains__(self, connection: T) -> bool:
        return connection in self._address

    @property
    def most(self) -> int:
        """Connections of the address with the most."""
        return self._counts.most

    def count(self, address: str) -> int:
        """Connections of an address."""
        return self._counts.count(address)

    def add(self, connection: T, address: str) -> T | None:
        """Returns the connection to be closed, which is no longer counted, if there are too many."""
        self._address[connection] = address
        self._by_address.setdefault(address, OrderedDict())[connection] = None
        self._counts.add(address, 1)
        return self.evict_oldest() if len(self) > self.limit else None

    def renew(self, connection: T) -> None:
        """Count a connection as the newest of its address. Raises KeyError for one that is not counted."""
        address = self._address[connection] = self._address.pop(connection)
        self._by_address[address].move_to_end(connection)

    def evict_oldest(self) -> T:
        """Remove the oldest connection of the address with the most. Raises KeyError where there is none."""
        connection = next(iter(self._by_address[self._counts.first_of_most()]))
        self.discard(connection)
        return connection

    def evict_newest(self) -> T:
        """Remove the newest connection of the address with the most. Raises KeyError where there is none."""
        connection = next(reversed(self._by_address[self._counts.last_of_most()]))
        self.discard(connection)
        return connection

    def discard(self, connection: T) -> None:
        """Count a connection no longer; without effect on one that is not counted."""
        address = self._address.pop(connection, None)
        if address is None:
            return
        own = self._by_address[address]
        del own[connection]
        if not own:
            del self._by_address[address]
        self._counts.add(address, -1)
