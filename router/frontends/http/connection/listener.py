"""uvicorn on connections that are accepted a few per turn of the event loop.

    accepted ──first bytes──► ready ──► TLS handshake ──► protocol, whose limits hold from there on
        │ silent for too long               │ too slow
        ▼                                   ▼
    closed                               closed

Of too many silent ones, or handshakes, the oldest of the address with the most is closed.

A silent connection makes room for a new one only if none of its bytes wait in the kernel. Where too many are ready, one of
the tenant or address with the most gets 429 (ready.py).

A connection that sends nothing costs a descriptor only: no TLS state, no protocol. Nor does one whose client has left
when its turn comes: a flood of connections that are reset at once would keep the event loop busy with their requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import uvicorn

from cluster.errors import OverloadedError
from cluster.open_connections import OpenConnections
from cluster.security.key_file import ApiKeys
from cluster.sockets import network, network_of, readable
from router.admission.turn_allowance import TurnAllowance
from router.frontends.http.connection.accept_queues import Accepted, AcceptQueues
from router.frontends.http.connection.acknowledged import TcpState, state_of
from router.frontends.http.connection.read_buffer import BufferedReads
from router.frontends.http.connection.ready import ReadyConnections
from router.frontends.http.connection.silent import SilentConnections
from router.frontends.http.errors import closing_answer
from router.listening import accepted_all, refuse_connections

MAX_HANDSHAKES = 256  # with TLS, at a time
POLL_SECONDS = 0.5  # between two checks for connections that were silent for too long
RETRY_SECONDS = 0.05
# At most: fewer leave new clients waiting behind a flood in the backlog, more delay streams.
ACCEPTS_PER_TURN = 32
# Of accepted ones, whose first bytes have arrived: more lengthen a turn, fewer leave clients behind a flood.
READABLE_PER_TURN = 256
# Bounds what one turn spends on connections whose clients have left.
LOOKED_AT_PER_TURN = 32
# Few, as a request needs about ten turns; what opening one costs: see ready.py.
OPENED_PER_TURN = 2
# Of processor time (see TurnAllowance).
SECONDS_PER_OPENING = 0.002
# With TLS: most of a handshake's work is done in the turn in which it is opened.
HANDSHAKES_PER_TURN = 4
# Of a request, read before it is refused: closing unread bytes would lose the answer
REFUSED_BYTES = 1 << 14
# While each further one turns another away, which takes about 0.1 ms: enough to find other clients behind a flood.
ACCEPTS_WHEN_FULL = 8
_POST = b"POST"


class HttpServer(uvicorn.Server):
    """Accepts connections itself: uvloop accepts all that wait in one turn, and thousands would delay every stream."""

    def __init__(self, config: uvicorn.Config, seconds: float, max_silent: int, keys: ApiKeys | None = None):
        """`seconds`: limit for a client's first bytes, and for the handshake. `max_silent`: limit of connections whose
        client has sent nothing yet; beyond, one is closed. `keys`: by which connections are opened in turns."""
        super().__init__(config)
        self._loop = asyncio.get_running_loop()  # asking for it is a system call in Python 3.11
        self._seconds = seconds
        self._max_silent = max_silent
        # Those accepted in one turn must not close each other: the first bytes are read in the turns that follow.
        self._accepts_per_turn = max(1, min(ACCEPTS_PER_TURN, max_silent // 4))
        self._accepting: asyncio.Task[None]
        self._closing: asyncio.Task[None]
        self._silent = SilentConnections()
        self._allowance = TurnAllowance(SECONDS_PER_OPENING, OPENED_PER_TURN)
        # Their first bytes have arrived
        self._ready = ReadyConnections(None if config.is_ssl else keys, max_silent)
        self._handshakes: OpenConnections[asyncio.Task[None]] = OpenConnections(
            MAX_HANDSHAKES if config.is_ssl else math.inf
        )
        text = f"{max_silent} connections wait to be opened at this router, and this client has the most; try again"
        self._refusal = closing_answer(429, OverloadedError(text, limit=str(max_silent)))

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leave the process's signal handlers alone; uvicorn would raise at its end what it caught."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._loop.add_reader(self._silent, self._begin_readable)
        self._accepting = self._loop.create_task(self._accept(sockets or []))
        self._closing = self._loop.create_task(self._close_silent())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [self._accepting, self._closing, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.remove_reader(self._silent)
        self._silent.close()
        while self._ready:
            self._ready.pop().close()
        await super().shutdown(sockets)

    async def accept_last(self, listeners: Sequence[socket.socket]) -> None:
        """Take no further connections, but serve those that wait to be accepted."""
        refuse_connections(listeners)
        await accepted_all(listeners)

    async def close_port(self, listeners: Sequence[socket.socket]) -> None:
        """Serve the connections that wait to be accepted, and close the listeners, also where a subclass's `accept_last`
        leaves that to others. Connections are served until the server exits."""
        await HttpServer.accept_last(self, listeners)
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        for listener in listeners:
            listener.close()

    async def _accept(self, listeners: Sequence[socket.socket]) -> None:
        with contextlib.closing(AcceptQueues(listeners)) as queues:
            for count in itertools.count(1):
                most = self._accepts_per_turn
                if count % (min(most, ACCEPTS_WHEN_FULL) if self._ready.full else most) == 0:
                    # While connections wait, `_next` returns without giving up the turn.
                    await asyncio.sleep(0)
                try:
                    self._add(*await self._next(queues))
                except OSError:  # the client's, or the system's limit of descriptors or watches: no busy loop
                    await asyncio.sleep(RETRY_SECONDS)

    async def _next(self, queues: AcceptQueues) -> Accepted:
        """Not `sock_accept`: uvloop's waits for the next turn, so one connection per turn would be accepted, and on a loop
        with long turns new clients would wait in the backlog."""
        while True:
            with contextlib.suppress(BlockingIOError):
                return queues.accept()
            await readable(queues)

    def _add(self, connection: socket.socket, client: Any) -> None:
        """Raises OSError if it cannot be watched."""
        try:
            self._silent.add(connection, network(client), self._loop.time() + self._seconds)
        except OSError:
            connection.close()
            raise
        self._make_room()

    def _make_room(self) -> None:
        """Close silent connections beyond the limit. Those whose first bytes have arrived are opened."""
        while len(self._silent) > self._max_silent:
            evicted = self._silent.take_oldest()
            self._begin(evicted) if _has_bytes(evicted) else evicted.close()

    async def _close_silent(self) -> None:
        while True:
            await asyncio.sleep(min(POLL_SECONDS, self._seconds))
            self._close_overdue()

    def _close_overdue(self) -> None:
        for connection in self._silent.overdue(self._loop.time()):
            connection.close()

    def _begin_readable(self) -> None:
        for connection in self._silent.take_readable(READABLE_PER_TURN):
            self._begin(connection)

    def _begin(self, connection: socket.socket) -> None:
        """Queue a connection whose first bytes, or whose end, have arrived."""
        begins = not self._ready
        if (refused := self._ready.push(connection)) is not None:
            self._refuse(refused)
        if begins:
            self._allowance.begin_turn()
            self._loop.call_soon(self._open_ready)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # its client has left
            if not self.config.ssl:
                connection.recv(REFUSED_BYTES)
                connection.send(self._refusal)

    def _open_ready(self) -> None:
        most = HANDSHAKES_PER_TURN if self.config.ssl else self._allowance.next_turn()
        for _ in range(min(LOOKED_AT_PER_TURN, len(self._ready))):
            if not most:
                break
            connection = self._ready.pop()
            if _has_left(connection, tls=bool(self.config.ssl)):
                connection.close()
                continue
            most -= 1
            task = self._loop.create_task(self._open(connection))
            task.add_done_callback(self._handshakes.discard)
            excess = self._handshakes.add(task, network_of(connection))
            if excess is not None:
                excess.cancel()
        if self._ready:
            self._loop.call_soon(self._open_ready)

    async def _open(self, connection: socket.socket) -> None:
        handshake: dict[str, Any] = {}
        if self.config.ssl:
            handshake = {"ssl": self.config.ssl, "ssl_handshake_timeout": self._seconds}
        with contextlib.suppress(OSError):  # a failed handshake: ssl.SSLError and TimeoutError are OSErrors
            await self._loop.connect_accepted_socket(self._protocol, connection, **handshake)

    def _protocol(self) -> asyncio.BufferedProtocol:
        make: Any = self.config.http_protocol_class
        return BufferedReads(partial(make, self.config, self.server_state, self.lifespan.state))


def _has_left(connection: socket.socket, *, tls: bool) -> bool:
    """Whether nothing that its client sent would be answered: the client has reset the connection, or has ended it before
    a handshake, before a request, or behind a POST (see `eof_received` of the protocol)."""
    match state_of(connection):
        case TcpState.CLOSE:
            return True
        case TcpState.CLOSE_WAIT:
            return tls or _first_bytes(connection) in (b"", _POST)
    return False


def _first_bytes(connection: socket.socket) -> bytes:
    try:
        return connection.recv(len(_POST), socket.MSG_PEEK)
    except OSError:  # it was reset meanwhile
        return b""


def _has_bytes(connection: socket.socket) -> bool:
    """Whether bytes of the client's wait to be read. Not: it is silent, or has ended."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:  # BlockingIOError among them: the socket does not block
        return False
