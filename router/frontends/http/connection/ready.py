"""The order in which connections whose first bytes have arrived are opened.

Opening a connection, and refusing or answering its first request, takes about 0.2 ms of the event loop: behind thousands
that come at once, a client would wait for half a second. So connections whose first request has a valid key are opened by
tenants in turns, all others by clients' addresses, one of either at a time.

Where too many connections wait, the newest one of the tenant or address with the most is refused. In the kernel's backlog,
which has no turns, every client would wait behind a flood from one tenant or address.
"""

from __future__ import annotations

import re
import socket

from cluster.errors import UnauthenticatedError
from cluster.round_robin import CountedRoundRobin
from cluster.security.key_file import ApiKeys
from cluster.sockets import network_of

# Of a request's head, where clients send their key; one that comes later is found by the gate alone
HEAD_BYTES = 2048
_KEY = re.compile(rb"\r\n(?:authorization:[ \t]*+bearer[ \t]++|x-api-key:[ \t]*+)(\S++)", re.IGNORECASE)


class ReadyConnections:
    """A queue of accepted connections. The order is all that a key decides here: the gate authenticates each request."""

    def __init__(self, keys: ApiKeys | None, limit: int):
        """`keys`: None where there are none, or heads are encrypted: then all connections wait by address. `limit`: of
        connections that wait, with a key and without each."""
        self._limit = limit
        self._keys = keys if keys is not None and keys.on else None
        self._with_key: CountedRoundRobin[socket.socket] = CountedRoundRobin()  # by tenant
        self._without_key: CountedRoundRobin[socket.socket] = CountedRoundRobin()  # by address
        self._last_had_key = False

    def __len__(self) -> int:
        return len(self._with_key) + len(self._without_key)

    @property
    def full(self) -> bool:
        """Whether a further connection may turn another one away."""
        return max(len(self._with_key), len(self._without_key)) >= self._limit

    def push(self, connection: socket.socket) -> socket.socket | None:
        """Returns the one to be turned away, if too many wait: the newest of the tenant, or address, with the most."""
        tenant = self._tenant(connection)
        if tenant is not None:
            queue, owner = self._with_key, tenant
        else:
            queue, owner = self._without_key, network_of(connection)
        queue.push(owner, connection)
        return queue.pop_newest_of_most() if len(queue) > self._limit else None

    def pop(self) -> socket.socket:
        """Remove and return the next connection. Raises KeyError where none waits."""
        with_key = bool(self._with_key) and not (self._last_had_key and self._without_key)
        self._last_had_key = with_key
        return (self._with_key if with_key else self._without_key).pop()

    def _tenant(self, connection: socket.socket) -> str | None:
        """The tenant of the first request's key. None: no valid key was found."""
        if self._keys is None:
            return None
        try:
            head, _, _ = connection.recv(HEAD_BYTES, socket.MSG_PEEK).partition(b"\r\n\r\n")
        except OSError:  # it was reset
            return None
        found = _KEY.search(head)
        if found is None:
            return None
        try:
            return self._keys.check(f"Bearer {found[1].decode('latin-1')}").tenant
        except UnauthenticatedError:
            return None
