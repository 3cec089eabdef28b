"""Connections that a gRPC server does not end by itself.

gRPC begins no write on a connection before it has read all that has arrived, and closes none before its last frame
(GOAWAY) is written. A client that sends faster than gRPC parses, window updates for example, thus keeps its connection
beyond every limit of time, and a server that stops would wait for it without end.

Nor does gRPC bound how long a client may leave what was written to it unread: each call on such a connection, also a
refused one, waits in memory for its status to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from cluster.process.socket_diag import Unread, unacknowledged_connections, unread_connections

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
# What waited longer than `seconds` for one of gRPC's threads is read at once, and may be half read at one look.
READS = 2
# For the servers' own work at a stop, beside what calls may take.
STOP_SECONDS = 1.0
# For gRPC to read what had arrived on them, some MiB each, before it sees that they have ended.
END_SECONDS = 10.0


class Server(Protocol):
    """The part of `grpc.aio.Server` that is used here."""

    async def stop(self, grace: float | None) -> None: ...


class _Flooded(NamedTuple):
    looks: int  # since the first one, or since something was sent
    reads: int  # of these the last ones, before each of which some was read
    last: Unread


class Watch(ABC):
    """Looks at a port's connections every POLL_SECONDS, on a thread of its own: what they send may keep an event loop
    busy."""

    what = ""  # it ends, for the log

    def __init__(self, port: int, seconds: float):
        """`seconds`: for which a connection must have been so, to be ended."""
        self._port = port
        # Counted: while the process stands still there are none.
        self._looks = math.ceil(seconds / POLL_SECONDS)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gRPC connections", daemon=True)

    def start(self) -> None:
        """Without effect, but for a line in the log, where the system does not show its connections."""
        try:
            unread_connections(self._port)
        except (OSError, AttributeError) as error:  # no such kernel; no such family of addresses
            log.warning("gRPC clients that %s keep their connections: %s", self.what, error)
        else:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        failed = False
        while not self._closed.wait(POLL_SECONDS):
            try:
                self.look()
            except OSError as error:
                if not failed:  # once, not each second
                    log.warning("looking for gRPC clients that %s failed; retrying: %s", self.what, error)
                failed = True
            else:
                failed = False

    def look(self) -> int:
        """Return how many connections it ended."""
        late = self._late()
        ended = end(self._port, late) if late else 0
        if ended:
            log.warning("ended %d gRPC connections of clients that %s", ended, self.what)
        return ended

    @abstractmethod
    def _late(self) -> set[int]:
        """Look, and return the inodes of connections to end."""


class FloodWatch(Watch):
    """Ends this process's connections on a port that have had unread bytes at each look for `seconds`, although bytes
    were read before each of the last looks, and on which nothing was sent meanwhile.

    HTTP/2's flow control lets no client send so long without an answer: it needs window updates. A connection that is
    not read stays, as gRPC's threads may be at work elsewhere; so does one that they have just begun to read.
    """

    what = "send without a pause"

    def __init__(self, port: int, seconds: float):
        super().__init__(port, seconds)
        self._flooded: dict[int, _Flooded] = {}  # by inode

    def _late(self) -> set[int]:
        before, self._flooded = self._flooded, {}
        late = set()
        for now in unread_connections(self._port):
            looks, reads, last = before.get(now.inode, (-1, 0, now))
            if now.sent != last.sent:
                looks, reads, last = -1, 0, now
            looks, reads = looks + 1, reads + 1 if now.read > last.read else 0
            if looks >= self._looks and reads >= READS:
                late.add(now.inode)
            else:
                self._flooded[now.inode] = _Flooded(looks, reads, now)
        return late


class StallWatch(Watch):
    """Ends this process's connections on a port whose peers have acknowledged nothing at each look for `seconds`, though
    something was written. What a stream's window holds back is not written: its connection stays, for the others."""

    what = "read nothing"

    def __init__(self, port: int, seconds: float):
        super().__init__(port, seconds)
        # By inode: looks since the first one; what was acknowledged by then
        self._stalled: dict[int, tuple[int, int]] = {}

    def _late(self) -> set[int]:
        before, self._stalled = self._stalled, {}
        late = set()
        for now in unacknowledged_connections(self._port):
            looks, acknowledged = before.get(now.inode, (-1, now.acknowledged))
            looks = looks + 1 if now.acknowledged == acknowledged else 0
            if looks >= self._looks:
                late.add(now.inode)
            else:
                self._stalled[now.inode] = looks, now.acknowledged
        return late


async def stop(servers: Sequence[Server], port: int, seconds: float) -> None:
    """Take no new calls; those that run after `seconds` are ended, and then the connections that gRPC does not end."""
    stopping = [asyncio.create_task(server.stop(seconds)) for server in servers]
    try:
        _, late = await asyncio.wait(stopping, timeout=seconds + STOP_SECONDS)
        if late:
            log.warning("ended %d connections that gRPC had not ended", end(port))
            await asyncio.wait(late, timeout=END_SECONDS)
    finally:
        for one in stopping:
            one.cancel()
    for one in stopping:
        if one.done():
            one.result()


def end(port: int, inodes: set[int] | None = None) -> int:
    """End those of this process's connections on a port, or all of them; return their number."""
    ended = 0
    for inode, sock in _connections(port):
        if inodes is None or inode in inodes:
            with contextlib.suppress(OSError):  # the peer has reset it
                # For gRPC's descriptor too, which reads the end; further bytes of the peer's reset the connection.
                sock.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def _connections(port: int) -> Iterator[tuple[int, socket.socket]]:
    """Duplicates of this process's connected sockets that have this port, with their inodes. Each is closed when the
    next one is taken."""
    if sys.platform != "linux":
        return
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with _duplicate(fd) as sock:
                if _is_connected(sock, port):
                    yield os.fstat(sock.fileno()).st_ino, sock


def _duplicate(fd: int) -> socket.socket:
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another thread has closed it, and opened what is no socket
        os.close(copy)
        raise


def _is_connected(sock: socket.socket, port: int) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    return sock.getsockname()[1] == port and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
