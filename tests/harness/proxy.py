"""A TCP proxy that can cut connections without closing them (what is sent stays in buffers, as behind a partition), or
reset them.

Two uses. With a fixed target it stands before one server. Without one it is an HTTP CONNECT proxy: gRPC takes its
address from `grpc_proxy` in the environment, links come here by `cluster_site/sitecustomize.py`, so every
connection of a cluster's processes passes through here, and the process that opened it is read off the kernel's tables. A
process of its own; commands are JSON lines on its standard input:

    {"op": "cut", "sources": [pids], "targets": ["127.0.0.1:4711"], "way": "both" | "to" | "from" | "reset"}   [] = any
    {"op": "heal"}

It answers each with a line: how many connections are cut now. Connections that open during a cut are cut, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import uvloop

_CONNECT = re.compile(rb"CONNECT ([^ ]+) HTTP/1\.1\r\n")
_ESTABLISHED_REPLY = b"HTTP/1.1 200 Connection established\r\n\r\n"
CONNECT_SECONDS = 5.0
MAX_HEAD_BYTES = 8192
RESET = "reset"
_NO_LINGER = struct.pack("ii", 1, 0)  # closing sends a reset


@dataclass(frozen=True)
class Cut:
    sources: frozenset[int]
    targets: frozenset[str]
    way: str  # from the side that opened the connection: "to" the target, "from" it, "both"; or RESET


@dataclass(eq=False)
class Connection:
    """Two half-pipes. A cut one is not read from: the kernel's buffers fill, and neither end notices."""

    target: str
    source_port: int
    client: Half = field(init=False)  # what the opener sends
    server: Half = field(init=False)
    pid: int | None = None

    def apply(self, way: str) -> None:
        """`way` is cut: "" none."""
        self.client.cut(way in ("to", "both"))
        self.server.cut(way in ("from", "both"))

    def reset(self) -> None:
        for half in (self.client, self.server):
            if half.transport is not None:
                half.transport.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
                )
                half.transport.abort()

    def close(self) -> None:
        for half in (self.client, self.server):
            if half.transport is not None:
                half.transport.close()


class Half(asyncio.Protocol):
    """Reads from one side, writes to the other."""

    def __init__(self, proxy: Proxy):
        self._proxy = proxy
        self.transport: asyncio.Transport | None = None
        self.connection: Connection | None = None
        self.peer: Half | None = None
        self._held: list[bytes] = []  # read before the cut, or before the other side was there
        self._cut = False
        self._choked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own do not say that they are one

    def data_received(self, data: bytes) -> None:
        if self.connection is None:
            self._held.append(data)
            self._proxy.head(self, b"".join(self._held))
        elif self._cut or self.peer is None or self.peer.transport is None:
            self._held.append(data)
        else:
            self.peer.transport.write(data)

    def paired(self) -> None:
        """The other side is there: what waits for it goes out, unless it is cut."""
        self._flush()

    def cut(self, on: bool) -> None:
        self._cut = on
        self._read()
        if not on:
            self._flush()

    def _flush(self) -> None:
        if not self._cut and self.peer is not None and self.peer.transport is not None:
            for data in self._held:
                self.peer.transport.write(data)
            self._held.clear()

    def _read(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):  # paused or resumed already
                if self._cut or self._choked:
                    self.transport.pause_reading()
                else:
                    self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.peer is not None:
            self.peer._choked = True
            self.peer._read()

    def resume_writing(self) -> None:
        if self.peer is not None:
            self.peer._choked = False
            self.peer._read()

    def connection_lost(self, error: Exception | None) -> None:
        if self.connection is not None:
            self._proxy.ended(self.connection, self)


class Proxy:
    def __init__(self, target: str = ""):
        """`target`: host:port or the path of a unix socket; "" = what CONNECT names."""
        self._target = target
        self._connections: set[Connection] = set()
        self._cuts: list[Cut] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self) -> Half:
        return _Opener(self) if self._target else Half(self)

    def head(self, opener: Half, head: bytes) -> None:
        """CONNECT has come, or a part of it."""
        if b"\r\n\r\n" not in head and len(head) < MAX_HEAD_BYTES:
            return
        named = _CONNECT.match(head)
        assert opener.transport is not None
        if named is None:
            opener.transport.close()
            return
        opener._held = [rest] if (rest := head.partition(b"\r\n\r\n")[2]) else []
        self.open(opener, named[1].decode(), _ESTABLISHED_REPLY)

    def open(self, opener: Half, target: str, reply: bytes = b"") -> None:
        assert opener.transport is not None
        peer = opener.transport.get_extra_info("peername")
        connection = Connection(target, peer[1] if isinstance(peer, tuple) else 0)
        connection.client, connection.server = opener, Half(self)
        opener.connection = connection.server.connection = connection
        self._connections.add(connection)
        way = self._way(connection)
        if way == RESET:
            self._reset(connection)
            return
        connection.apply(way)
        task = asyncio.get_running_loop().create_task(self._connect(connection, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: Connection, reply: bytes) -> None:
        """While a cut would keep the packets back, nothing is connected and nothing answered."""
        while self._way(connection) and connection in self._connections:
            await asyncio.sleep(0.02)
        if connection not in self._connections:
            return
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if connection.target.startswith("/"):
                    await loop.create_unix_connection(lambda: connection.server, connection.target)
                else:
                    host, port = connection.target.rsplit(":", 1)
                    await loop.create_connection(lambda: connection.server, host.strip("[]"), int(port))
        except (OSError, TimeoutError):
            connection.close()
            return
        opener = connection.client.transport
        if opener is None or opener.is_closing():  # it hung up meanwhile
            connection.close()
            return
        if reply:
            opener.write(reply)
        # Only now: bytes that a server sends first must not precede the reply.
        connection.client.peer, connection.server.peer = connection.server, connection.client
        connection.client.paired()
        connection.server.paired()

    def ended(self, connection: Connection, side: Half) -> None:
        """One side hung up: the other gets the end, unless the connection is cut."""
        if connection not in self._connections:
            return
        if side._cut:
            asyncio.get_running_loop().call_later(0.05, self.ended, connection, side)
            return
        self._connections.discard(connection)
        connection.close()

    # --- cuts --------------------------------------------------------------------------------------------

    def cut(self, sources: Iterable[int], targets: Iterable[str], way: str) -> int:
        self._cuts.append(Cut(frozenset(sources), frozenset(targets), way))
        return self._apply()

    def heal(self) -> int:
        self._cuts.clear()
        return self._apply()

    def _apply(self) -> int:
        count = 0
        for connection in list(self._connections):
            way = self._way(connection)
            if way == RESET:
                self._reset(connection)
            else:
                connection.apply(way)
            count += bool(way)
        return count

    def _reset(self, connection: Connection) -> None:
        self._connections.discard(connection)
        connection.reset()

    def _way(self, connection: Connection) -> str:
        for cut in self._cuts:
            if cut.targets and connection.target not in cut.targets:
                continue
            if not cut.sources or self._opened_by(connection, cut.sources):
                return cut.way
        return ""

    def _opened_by(self, connection: Connection, pids: frozenset[int]) -> bool:
        if connection.pid is None:
            inode = _inode(connection.source_port)
            owners = (pid for pid in pids if inode and _holds(pid, inode))
            connection.pid = next(owners, None)
        return connection.pid is not None and connection.pid in pids


class _Opener(Half):
    """With a fixed target no CONNECT request is expected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy.open(self, self._proxy._target)


def _inode(port: int) -> str:
    """Of the socket whose local port this is."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as lines:
            for line in lines:
                fields = line.split()
                if fields[1].endswith(f":{port:04X}") and fields[9] != "0":
                    return fields[9]
    return ""


def _holds(pid: int, inode: str) -> bool:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{name}") == f"socket:[{inode}]":
                    return True
    return False


async def serve(target: str) -> None:
    proxy = Proxy(target)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(proxy.accept, "127.0.0.1", 0)
    _say({"port": server.sockets[0].getsockname()[1]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        order: dict[str, Any] = json.loads(line)
        if order.pop("op") == "cut":
            _say({"cut": proxy.cut(**order)})
        else:
            _say({"cut": proxy.heal()})
    server.close()


def _say(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1] if len(sys.argv) > 1 else ""))
