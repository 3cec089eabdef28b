"""Accepted connections whose client has sent nothing yet, and which of them makes room for a further one."""

from __future__ import annotations

import socket
from collections.abc import Iterator, MutableMapping

from cluster.open_connections import OpenConnections
from cluster.sockets import network_of


class SilentConnections(MutableMapping[socket.socket, float]):
    """Each to its deadline, oldest first. Adding, removing and `next_to_go` take the same time for any number."""

    def __init__(self) -> None:
        self._deadlines: dict[socket.socket, float] = {}
        self._open: OpenConnections[socket.socket] = OpenConnections()

    def next_to_go(self) -> socket.socket:
        """The oldest of the address with the most, so that a flood from one closes none of another's. Raises KeyError
        where there is none."""
        return self._open.oldest_of_most()

    def __setitem__(self, connection: socket.socket, deadline: float) -> None:
        self._deadlines[connection] = deadline
        self._open.add(connection, network_of(connection))

    def __delitem__(self, connection: socket.socket) -> None:
        del self._deadlines[connection]
        self._open.discard(connection)

    def __getitem__(self, connection: socket.socket) -> float:
        return self._deadlines[connection]

    def __iter__(self) -> Iterator[socket.socket]:
        return iter(self._deadlines)

    def __len__(self) -> int:
        return len(self._deadlines)
