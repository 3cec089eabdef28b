"""The queues of connections that wait to be accepted at a port's listening sockets."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Iterable
from typing import Any

Accepted = tuple[socket.socket, Any]  # and its client's address, as of socket


class AcceptQueues:
    """Accepts one connection of each listening socket in turn: behind a flood at one of them, a connection at another
    waits for one of it."""

    def __init__(self, listeners: Iterable[socket.socket]):
        """`listeners` do not block from now on. They stay their owner's to close."""
        self._waiting: deque[socket.socket] = deque()  # at which connections wait, as seen last
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable while connections wait."""
        return self._selector.fileno()

    def accept(self) -> Accepted:
        """Return a connection that does not block. Raises OSError; BlockingIOError where none waits."""
        if not self._waiting:
            self._waiting.extend(key.fileobj for key, _ in self._selector.select(0))  # type: ignore[misc]
        while self._waiting:
            try:
                connection, address = self._waiting.popleft().accept()
            except BlockingIOError:  # another process was first
                continue
            connection.setblocking(False)
            return connection, address
        raise BlockingIOError

    def close(self) -> None:
        self._selector.close()
