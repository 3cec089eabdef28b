"""The order in which connections whose first bytes have arrived are opened.

Opening one, and refusing or answering its first request, takes about 0.2 ms of the event loop: behind thousands that come
at once, a client would wait for half a second. So connections whose first request has a valid key are opened by tenants in
turns, all others by clients' addresses, one of either at a time.
"""

from __future__ import annotations

import re
import socket

from cluster.errors import UnauthenticatedError
from cluster.rotation import Rotation
from cluster.security.key_file import ApiKeys

# Of a request's head, where clients send their key; one that comes later is found by the gate alone
HEAD_BYTES = 2048
_KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]+|x-api-key:[ \t]*)(\S+)", re.IGNORECASE)


class ReadyConnections:
    def __init__(self, keys: ApiKeys | None):
        """`keys`: None where all clients are strangers, or heads are encrypted."""
        self._keys = keys if keys is not None and keys.on else None
        self._with_key: Rotation[socket.socket] = Rotation()  # by tenant
        self._strangers: Rotation[socket.socket] = Rotation()  # by address
        self._last_had_key = False

    def __len__(self) -> int:
        return len(self._with_key) + len(self._strangers)

    def push(self, connection: socket.socket) -> None:
        tenant = self._tenant(connection)
        if tenant is None:
            self._strangers.push(_address(connection), connection)
        else:
            self._with_key.push(tenant, connection)

    def pop(self) -> socket.socket:
        """Raises KeyError where none waits."""
        with_key = bool(self._with_key) and not (self._last_had_key and self._strangers)
        self._last_had_key = with_key
        return (self._with_key if with_key else self._strangers).pop()

    def _tenant(self, connection: socket.socket) -> str | None:
        """By which the connection waits; what its requests may do is the gate's to say. None: no valid key was found."""
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


def _address(connection: socket.socket) -> str:
    try:
        peer = connection.getpeername()
    except OSError:  # it was reset
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""
