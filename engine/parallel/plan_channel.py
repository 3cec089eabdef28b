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

import contextlib
import hmac
import os
import socket
import struct
import time
import weakref
from datetime import timedelta

from torch._C._distributed_c10d import Store

from cluster.addresses import listen_at, split

_KEY = "plans"
_ADDRESS = struct.Struct("<H16s")  # in the store: port, token
_GREETING = struct.Struct("<16sI")  # token, number of the rank
_LENGTH = struct.Struct("<q")
_GREETING_SECONDS = 2.0  # the ranks wait this long for a peer that connects and says nothing


class LeaderChannel:
    """The leader's end."""

    def __init__(self, store: Store, host: str, size: int, seconds: float):
        """Raises OSError if not every other rank has connected after `seconds`."""
        until = time.monotonic() + seconds
        token = os.urandom(16)
        self._ranks = dict[int, socket.socket]()
        # A worker whose engine has failed drops its group and does not close it.
        self.close = weakref.finalize(self, _close, self._ranks)
        address, listener = listen_at(host)
        with listener:
            store.set(_KEY, _ADDRESS.pack(split(address)[1], token).hex())
            try:
                while len(self._ranks) < size - 1:
                    self._accept(listener, token, size, until)
            except OSError:
                self.close()
                raise

    def _accept(self, listener: socket.socket, token: bytes, size: int, until: float) -> None:
        listener.settimeout(max(until - time.monotonic(), 0.001))
        connection, _ = listener.accept()
        rank = _greeting(connection, token)
        if rank is None or not 0 < rank < size or rank in self._ranks:
            connection.close()
            return
        connection.settimeout(None)
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
        self._connection.sendall(_GREETING.pack(token, rank))
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


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


def _greeting(connection: socket.socket, token: bytes) -> int | None:
    """The number of the rank that has connected; None for a peer that does not know the token."""
    greeting = bytearray(_GREETING.size)
    with contextlib.suppress(OSError):
        _read(connection, greeting, time.monotonic() + _GREETING_SECONDS)
        said, rank = _GREETING.unpack(greeting)
        if hmac.compare_digest(said, token):
            return int(rank)
    return None


def _read(connection: socket.socket, into: bytearray, until: float | None = None) -> None:
    """Fill `into`. Raises OSError at the end of the connection, or at `until` (monotonic seconds)."""
    view = memoryview(into)
    while view:
        if until is not None:
            connection.settimeout(max(until - time.monotonic(), 0.001))
        count = connection.recv_into(view, 0, 0 if until is not None else socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection for plans was closed")
        view = view[count:]
