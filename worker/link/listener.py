"""Accepts the links of routers, on a port of its own beside the worker's gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable

from cluster.addresses import join
from cluster.errors import ConfigError
from cluster.faults.points import NO_FAULTS, Faults, Point
from cluster.process.descriptors import free_for_connections, raised
from cluster.protocol.times import BEAT_SECONDS
from cluster.security.tls import Peers
from cluster.sockets import listen
from worker.link.connection import CLOSE_SECONDS, Connection
from worker.link.open_links import OpenLinks
from worker.link.routers import Routers
from worker.link.session import Session, WorkerFacts
from worker.link.turns import Dispatching, Handshakes

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024  # one of each router process; handshakes included
PAUSE_SECONDS = 0.1  # after an accept that failed: no descriptor is free
BACKLOG = 256
ACCEPTS_PER_TURN = 16  # while connections wait to be accepted, nothing else would get a turn
LOG_SECONDS = 10.0  # between two lines about a full port


class LinkListener:
    """`bind`, then `start`; `stop` at the end. Routers connect to `address`.

    Implements worker.link.connection.ConnectionOwner.
    """

    def __init__(self, host: str, advertised_host: str, peers: Peers, faults: Faults = NO_FAULTS):
        self._host = host
        self._advertised_host = advertised_host
        self._context = peers.link_listener()
        self._at_frame = faults.point(Point.LINK_FRAME)
        self._socket: socket.socket | None = None
        self.handshakes = Handshakes()
        self.dispatching = Dispatching()
        self._open: OpenLinks[Connection] = OpenLinks(min(MAX_CONNECTIONS, free_for_connections(raised())))
        self._accepting: asyncio.Task[None] | None = None
        self._renewing: asyncio.TimerHandle | None = None
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
            made = Connection(session, self, accepted, context, self._at_frame)
            excess = self._open.add(made, made.address)
            if excess is not None:
                self._evicted(excess, made)
            if not accepts % ACCEPTS_PER_TURN:
                await asyncio.sleep(0)

    def _evicted(self, connection: Connection, new: Connection) -> None:
        if connection is new or connection.settled:
            self._log_full()
        connection.abort()

    def _log_full(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning(
                "links of routers are refused or closed: %d are open, and no more may be; one address has %d",
                self._open.limit,
                self._open.links.most,
            )

    # --- worker.link.connection.ConnectionOwner ------------------------------------------------------------

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if self._closed is not None and not self._open:
            self._closed.set()

    def settled(self, connection: Connection) -> None:
        self._open.settle(connection, connection.address, is_link=connection.settled)

    # -------------------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Reload certificate files that have changed; ask the routers of all open links for others."""
        if self._context is not None and self._context.refresh():
            for connection in self._open:
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
        for connection in list(self._open):
            connection.end()
        if self._open:
            self._closed = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), CLOSE_SECONDS)
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)
