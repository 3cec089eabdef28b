"""Accepts the links of routers, on a port of its own beside the worker's gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable

from cluster.addresses import join, listen
from cluster.errors import ConfigError
from cluster.faults.points import NO_FAULTS, Faults, Point
from cluster.process.descriptors import free_for_connections, raised
from cluster.protocol.times import BEAT_SECONDS
from cluster.security.tls import Peers
from worker.link.connection import CLOSE_SECONDS, Connection
from worker.link.routers import Routers
from worker.link.session import Session, WorkerFacts

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024  # one of each router process; handshakes included
PAUSE_SECONDS = 0.1  # after an accept that failed: no descriptor is free
BACKLOG = 256
ACCEPTS_A_TURN = 16  # while connections wait to be accepted, nothing else would get a turn
LOG_SECONDS = 10.0  # between two lines about a full port


class LinkListener:
    """`bind`, then `start`. Routers reach it at `address`."""

    def __init__(self, host: str, advertised_host: str, peers: Peers, faults: Faults = NO_FAULTS):
        self._host = host
        self._advertised_host = advertised_host
        self._context = peers.link_listener()
        self._at_frame = faults.point(Point.LINK_FRAME)
        self._socket: socket.socket | None = None
        self._connections: dict[Connection, None] = {}  # oldest first
        self._accepting: asyncio.Task[None] | None = None
        self._renewing: asyncio.TimerHandle | None = None
        self._most = min(MAX_CONNECTIONS, free_for_connections(raised()))
        self._logged = -LOG_SECONDS
        self._closed: asyncio.Event | None = None  # at the end: no link is open any more

    @property
    def address(self) -> str:
        assert self._socket is not None, "bind comes first"
        return join(self._advertised_host, self._socket.getsockname()[1])

    def bind(self, port: int = 0) -> None:
        """Open the port. Raises ConfigError if it is taken."""
        try:
            listening = listen(self._host, port, BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join(self._host, port)}: {error}", field="link_port"
            ) from error
        listening.setblocking(False)
        self._socket = listening

    def start(self, routers: Routers, facts: WorkerFacts, engine_step: Callable[[], int | None]) -> None:
        def session(connection: Connection) -> Session:
            return Session(routers, facts, connection, engine_step)

        loop = asyncio.get_running_loop()
        self._accepting = loop.create_task(self._accept(session))
        self._renewing = loop.call_later(BEAT_SECONDS, self._renew)

    async def _accept(self, session: Callable[[Connection], Session]) -> None:
        assert self._socket is not None, "bind comes first"
        loop = asyncio.get_running_loop()
        context = self._context.context if self._context is not None else None
        for accepts in itertools.count(1):
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:  # no descriptor is free, or the peer is gone already
                log.debug("a link was not accepted: %s", error)
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if len(self._connections) < self._most or self._make_room():
                made = Connection(session, self._forget, accepted, context, self._at_frame)
                self._connections[made] = None
            else:
                accepted.close()
            if not accepts % ACCEPTS_A_TURN:
                await asyncio.sleep(0)

    def _make_room(self) -> bool:
        """Close the oldest connection that is not its router's link: silent ones must not keep routers out."""
        oldest = next((one for one in self._connections if not one.settled), None)
        if oldest is not None:
            self._forget(oldest)
            oldest.abort()
            return True
        now = asyncio.get_running_loop().time()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning("links of routers are refused: %d are open, and no more may be", self._most)
        return False

    def _forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        if self._closed is not None and not self._connections:
            self._closed.set()

    def _renew(self) -> None:
        """Certificates that have changed: the links that the old ones opened move to new ones."""
        if self._context is not None and self._context.refresh():
            for connection in self._connections:
                connection.leave_soon()
        self._renewing = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._renew)

    async def stop(self) -> None:
        """Close the port and all links: cut those whose routers have not read the rest within CLOSE_SECONDS."""
        if self._renewing is not None:
            self._renewing.cancel()
        if self._accepting is not None:
            self._accepting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._accepting
        if self._socket is not None:
            self._socket.close()
        for connection in list(self._connections):
            connection.end()
        if self._connections:
            self._closed = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), CLOSE_SECONDS)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
