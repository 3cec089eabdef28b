"""The leader's messages to the other ranks: plans of steps, and orders for adapters.

They take a TCP connection to each rank and not the process group. A broadcast of gloo wakes a thread on both sides, which
takes longer than the message. A broadcast of NCCL runs on the device, behind the kernels of the steps before, so that no
rank could read a plan before its device has finished the last one.

    leader                                      other rank
    listens; port and token into the store
                                                connects, sends the token and its number
    has accepted every rank: listens no more
    length (8 bytes), message     ──────────▶   reads one message
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Iterable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store

from cluster.addresses import split
from cluster.sockets import listen_at

_KEY = "plans"
_ADDRESS = struct.Struct("<H16s")  # in the store: port, token
_GREETING = struct.Struct("<16sI")  # token, number of the rank
_LENGTH = struct.Struct("<q")
_MAX_GREETINGS = 64  # connections that have not said all of theirs: of more, the oldest is closed


class LeaderChannel:
    """The leader's end."""

    def __init__(self, store: Store, host: str, size: int, seconds: float):
        """Raises OSError if not every other rank has connected after `seconds`."""
        until = time.monotonic() + seconds
        token = os.urandom(16)
        self._ranks = dict[int, socket.socket]()
        # A worker whose engine has failed drops its group and does not close it.
        self.close = weakref.finalize(self, _close, self._ranks.values())
        address, listener = listen_at(host)
        with listener, _Greetings(listener) as greetings:
            store.set(_KEY, _ADDRESS.pack(split(address)[1], token).hex())
            try:
                while len(self._ranks) < size - 1:
                    for connection, greeting in greetings.come(until):
                        self._take(connection, greeting, token, size)
            except OSError:
                self.close()
                raise

    def _take(self, connection: socket.socket, greeting: bytes, token: bytes, size: int) -> None:
        """Add the rank that has connected, or close the connection of a peer that is none."""
        said, rank = _GREETING.unpack(greeting)
        if not hmac.compare_digest(said, token) or not 0 < rank < size or rank in self._ranks:
            connection.close()
            return
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ranks[rank] = connection

    def send(self, message: bytes) -> None:
        """Raises OSError if a rank has closed its connection. Waits while a rank does not read and its connection is full:
        a rank that hangs is ended by its watch (worker/ranks/watch.py), which closes the connection."""
        framed = _LENGTH.pack(len(message)) + message
        for connection in self._ranks.values():
            connection.sendall(framed)


class RankChannel:
    """Another rank's end."""

    def __init__(self, store: Store, host: str, rank: int, seconds: float):
        """Raises OSError or RuntimeError if the leader at `host` is not there after `seconds`."""
        store.wait([_KEY], timedelta(seconds=seconds))
        port, token = _ADDRESS.unpack(bytes.fromhex(store.get(_KEY).decode()))
        self._connection = socket.create_connection((host, port), timeout=seconds)
        try:
            self._connection.sendall(_GREETING.pack(token, rank))
        except OSError:
            self._connection.close()
            raise
        self._connection.settimeout(None)
        self._length = bytearray(_LENGTH.size)

    def receive(self) -> bytes:
        """The next message, whenever it comes. Raises OSError if the connection is closed."""
        _read(self._connection, self._length)
        message = bytearray(_LENGTH.unpack(self._length)[0])
        _read(self._connection, message)
        return bytes(message)

    def close(self) -> None:
        self._connection.close()


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


class _Greetings:
    """Reads what peers say first, of all at a time: one that says nothing keeps no rank waiting."""

    def __init__(self, listener: socket.socket):
        listener.setblocking(False)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._said = dict[socket.socket, bytes]()  # so far, oldest first

    def __enter__(self) -> _Greetings:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        _close(self._said)

    def come(self, until: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Wait for peers, and return the connections whose greetings are complete, which do not block. Raises TimeoutError
        at `until` (monotonic seconds), and OSError."""
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        for key, _ in self._selector.select(left):
            if key.fileobj is self._listener:
                self._accept()
                continue
            for connection in [one for one in self._said if one is key.fileobj]:  # none: closed by _accept
                self._read(connection)
                if len(self._said.get(connection, b"")) == _GREETING.size:
                    self._selector.unregister(connection)
                    yield connection, self._said.pop(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer is gone already
            return
        connection.setblocking(False)
        self._said[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._said) > _MAX_GREETINGS:
            self._drop(next(iter(self._said)))

    def _read(self, connection: socket.socket) -> None:
        said = self._said[connection]
        try:
            more = connection.recv(_GREETING.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if more:
            self._said[connection] = said + more
        else:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        del self._said[connection]
        self._selector.unregister(connection)
        connection.close()


def _read(connection: socket.socket, into: bytearray) -> None:
    """Fill `into`. Raises OSError at the end of the connection."""
    view = memoryview(into)
    while view:
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection for plans was closed")
        view = view[count:]
