"""Accepts the links of routers, on a port of its own beside the worker's gRPC server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable

from cluster.addresses import join, listen, network_of
from cluster.errors import ConfigError
from cluster.faults.points import NO_FAULTS, Faults, Point
from cluster.open_connections import OpenConnections
from cluster.process.descriptors import free_for_connections, raised
from cluster.protocol.times import BEAT_SECONDS
from cluster.security.tls import Peers
from worker.link.connection import CLOSE_SECONDS, Connection
from worker.link.routers import Routers
from worker.link.session import Session, WorkerFacts
from worker.link.turns import Dispatching, Handshakes

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 1024  # one of each router process; handshakes included
PAUSE_SECONDS = 0.1  # after an accept that failed: no descriptor is free
BACKLOG = 256
ACCEPTS_A_TURN = 16  # while connections wait to be accepted, nothing else would get a turn
ADDRESS_SHARES = 8  # links of an address beyond this part of all make room for those of others
LOG_SECONDS = 10.0  # between two lines about a full port


class LinkListener:
    """`bind`, then `start`. Routers reach it at `address`."""

    def __init__(self, host: str, advertised_host: str, peers: Peers, faults: Faults = NO_FAULTS):
        self._host = host
        self._advertised_host = advertised_host
        self._context = peers.link_listener()
        self._at_frame = faults.point(Point.LINK_FRAME)
        self._socket: socket.socket | None = None
        self.handshakes = Handshakes()
        self.dispatching = Dispatching()
        self._connections: dict[Connection, None] = {}  # oldest first
        # Those of them that are not a router's link, and those that are
        self._opening: OpenConnections[Connection] = OpenConnections(MAX_CONNECTIONS)
        self._links: OpenConnections[Connection] = OpenConnections(MAX_CONNECTIONS)
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
            if len(self._connections) < self._most or self._make_room(network_of(accepted)):
                made = Connection(session, self, accepted, context, self._at_frame)
                self._connections[made] = None
                self._opening.add(made, made.address)
            else:
                accepted.close()
            if not accepts % ACCEPTS_A_TURN:
                await asyncio.sleep(0)

    def _make_room(self, address: str) -> bool:
        """Close a connection for a new one of `address`: the oldest that is not its router's link, of the address with the
        most; where all are links, the newest of the address with the most if those are more than its share."""
        if self._opening:
            excess = self._opening.give_up_one()
        else:
            self._log_full()
            most = self._links.most
            if most <= self._most // ADDRESS_SHARES or self._links.count(address) + 1 >= most:
                return False
            excess = self._links.give_up_newest()
        self.forget(excess)
        excess.abort()
        return True

    def _log_full(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            log.warning(
                "links of routers are refused or closed: %d are open, and no more may be; one address has %d",
                self._most,
                self._links.most,
            )

    # --- worker.link.connection.Port -----------------------------------------------------------------------

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._opening.discard(connection)
        self._links.discard(connection)
        if self._closed is not None and not self._connections:
            self._closed.set()

    def settled(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        before, now = self._opening, self._links
        if not connection.settled:
            before, now = now, before
        before.discard(connection)
        now.add(connection, connection.address)

    # -------------------------------------------------------------------------------------------------------

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
