"""Opens the connections of one link: attempts with pauses, and the greeting."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster.addresses import split
from cluster.errors import PeerLostError
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import (
    LINK_LOST_SECONDS,
    LINK_VERSION,
    MIN_LINK_VERSION,
    RETRY_SECONDS,
    VERSION_1_HANDLES,
    WELCOME_SECONDS,
)
from cluster.security.peer_names import WORKER_NAME
from cluster.security.tls import Peers
from router.link.connection import Connection, ConnectionOwner
from router.link.identity import RouterIdentity
from wire import link_pb2

CONNECT_SECONDS = 5.0  # of one attempt, TLS included; a link that broke has LINK_LOST_SECONDS in all
TCP_SECONDS = 0.2  # of one attempt at a link that broke, without TLS: the kernel repeats a lost SYN after 1 s
LAST_TRIES_SECONDS = 0.15  # before a link that broke is lost, it is tried after shorter pauses
MIN_PAUSE_SECONDS = 0.05
MAX_LATE_SECONDS = 0.1  # of one pause: so much of this process's own lateness does not count


class Opener:
    """Connects to one worker, over TLS where `peers` has certificates."""

    def __init__(self, worker: WorkerInfo, identity: RouterIdentity, peers: Peers):
        self._worker = worker
        self._identity = identity
        self._peers = peers
        self._loop = asyncio.get_running_loop()

    async def open(self, link: ConnectionOwner, was_up: bool, attempt: int) -> Connection:
        """A welcomed connection, after the pauses from the `attempt`-th on. Raises PeerLostError: refused, another epoch,
        no welcome in time."""
        seconds = LINK_LOST_SECONDS if was_up else CONNECT_SECONDS
        tcp_seconds = TCP_SECONDS if was_up else CONNECT_SECONDS
        deadline = self._loop.time() + seconds
        pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
        while True:
            deadline += await self._sleep(pause)
            attempt += 1
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    reached = await self._reach(tcp_seconds)
                    limit.reschedule(None)
                    async with self._turn(reached) as waited:
                        deadline += waited
                        limit.reschedule(deadline + WELCOME_SECONDS)
                        return await self._greet(link, reached)
            except ConnectionRefusedError as error:
                raise PeerLostError(f"{self._worker.worker_id} refuses connections: {error}") from None
            except (OSError, TimeoutError) as error:
                left = deadline - self._loop.time()
                if left <= MIN_PAUSE_SECONDS:
                    raise PeerLostError(
                        f"no link to {self._worker.worker_id} within {seconds} s: {str(error) or 'no answer'}"
                    ) from None
                pause = min(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)], left - LAST_TRIES_SECONDS)
                pause = max(pause, MIN_PAUSE_SECONDS)
            # After OSError, because a TLS error is a ValueError too: only a registered address that is none remains.
            except (ValueError, OverflowError) as error:
                address = self._worker.link_address
                raise PeerLostError(f"{self._worker.worker_id}: link address {address!r}: {error}") from None

    async def _sleep(self, seconds: float) -> float:
        """Returns the seconds by which this process was late, at most MAX_LATE_SECONDS: answers that arrived meanwhile are
        unread."""
        due = self._loop.time() + seconds
        await asyncio.sleep(seconds)
        return min(max(0.0, self._loop.time() - due), MAX_LATE_SECONDS)

    @asynccontextmanager
    async def _turn(self, reached: socket.socket) -> AsyncIterator[float]:
        """Wait for a turn to begin TLS. Yields the seconds waited, which count as this process's own delay."""
        if self._peers.identity is None:
            yield 0.0
            return
        waits = True
        try:
            async with self._identity.handshakes.turn() as waited:
                waits = False
                yield waited
        finally:
            if waits:
                reached.close()

    async def greet(self, link: ConnectionOwner) -> Connection:
        """Raises OSError, or PeerLostError for another worker or epoch, or without a common version."""
        reached = await self._reach(CONNECT_SECONDS)
        async with self._turn(reached):
            return await self._greet(link, reached)

    async def _greet(self, link: ConnectionOwner, reached: socket.socket) -> Connection:
        worker = self._worker
        hello = link_pb2.LinkHello(
            min_version=MIN_LINK_VERSION,
            max_version=LINK_VERSION,
            router_id=self._identity.router_id,
            incarnation=self._identity.incarnation,
            serial=self._identity.next_serial(),
            worker_id=worker.worker_id,
            epoch=worker.epoch,
        )
        connection = Connection(link, hello, self._peers.version)
        context = self._identity.tls_context(self._peers)
        try:
            await self._loop.create_connection(
                lambda: connection,
                sock=reached,
                ssl=context,
                server_hostname=WORKER_NAME if context is not None else None,
            )
            welcome = await connection.welcomed
        except BaseException:
            connection.abort()
            raise
        if (welcome.worker_id, welcome.epoch) != (worker.worker_id, worker.epoch):
            connection.abort()
            # A welcome has neither where the hello has another of the two.
            raise PeerLostError(
                f"{worker.link_address} is another worker than {worker.name}, or in another epoch"
            )
        if not MIN_LINK_VERSION <= welcome.version <= LINK_VERSION:
            connection.abort()
            raise PeerLostError(
                f"{worker.worker_id} accepts no link version from {MIN_LINK_VERSION} to {LINK_VERSION}"
            )
        if welcome.version == 1 and self._identity.handle_after > VERSION_1_HANDLES:
            connection.abort()
            raise PeerLostError(
                f"{worker.worker_id} accepts link version 1, whose handles this router has used up: "
                f"upgrade the worker, or restart the router"
            )
        if connection.is_lost:
            raise ConnectionResetError("closed after the welcome")
        return connection

    async def _reach(self, seconds: float) -> socket.socket:
        """The first of its addresses that answers, each within its share of `seconds`: a name may have one of each family,
        and a worker listens at one. Raises OSError; ConnectionRefusedError if all of them refuse."""
        host, port = split(self._worker.link_address)
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failed: OSError = ConnectionRefusedError()
        for family, kind, protocol, _, address in found:
            try:
                return await self._connected(
                    socket.socket(family, kind, protocol), address, seconds / len(found)
                )
            except OSError as error:
                failed = error if isinstance(failed, ConnectionRefusedError) else failed
        raise failed

    async def _connected(self, reached: socket.socket, address: Any, seconds: float) -> socket.socket:
        reached.setblocking(False)
        try:
            async with asyncio.timeout(seconds):
                await self._loop.sock_connect(reached, address)
        except BaseException:
            reached.close()
            raise
        return reached
