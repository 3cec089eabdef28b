"""The connections of a port for links, and which of them is closed where there are too many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from cluster.open_connections import OpenConnections

T = TypeVar("T")
ADDRESS_SHARES = 8  # an address's share of all connections is one of so many


class OpenLinks(Generic[T]):
    """At most `limit` connections: those that are opening, and those that are a router's link. One that another link of
    its router has replaced counts as opening.

    One too many is evicted, in this order:

    1. of an address with several opening connections, the oldest of them, by the rule of OpenConnections
    2. the new connection, if its address has more links than its share
    3. the oldest opening connection, if it is another than the new one
    4. the newest link of the address with the most, if these are more than its share, and than the new one's address would
       have: links last, so the older ones are in use
    5. the new connection
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.opening: OpenConnections[T] = OpenConnections()
        self.links: OpenConnections[T] = OpenConnections()

    def __len__(self) -> int:
        return len(self.opening) + len(self.links)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self.opening, self.links)

    def __contains__(self, connection: T) -> bool:
        return connection in self.opening or connection in self.links

    def add(self, connection: T, address: str) -> T | None:
        """Count a connection that is opening. Returns the one to be closed, which is no longer counted, if there are too
        many: the new one itself, perhaps."""
        self.opening.add(connection, address)
        return self._evict(connection, address) if len(self) > self.limit else None

    def _evict(self, new: T, address: str) -> T:
        if self.opening.most > 1:
            return self.opening.evict_oldest()
        if self.links.count(address) > self._share:
            self.opening.discard(new)
            return new
        if len(self.opening) > 1:
            return self.opening.evict_oldest()
        if self.links.most > max(self._share, self.links.count(address) + 1):
            return self.links.evict_newest()
        self.opening.discard(new)
        return new

    @property
    def _share(self) -> int:
        return self.limit // ADDRESS_SHARES

    def settle(self, connection: T, address: str, *, is_link: bool) -> None:
        """Count the connection as a router's link, or as opening. Without effect on one that is not counted."""
        before, now = (self.opening, self.links) if is_link else (self.links, self.opening)
        if connection in before:
            before.discard(connection)
            now.add(connection, address)

    def discard(self, connection: T) -> None:
        """Count a connection no longer; without effect on one that is not counted."""
        self.opening.discard(connection)
        self.links.discard(connection)
