"""The HTTP port of a process whose listening sockets all processes of its router share.

A connection waits in the queue of its address's share for whichever process accepts it first, so none is lost with a
process that ends, stops or leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

import uvicorn

from cluster.security.key_file import ApiKeys
from cluster.sockets import readable
from router.frontends.http.connection.accept_queues import Accepted, AcceptQueues
from router.frontends.http.connection.listener import HttpServer
from router.frontends.http.connection.protocol import LimitedProtocol
from router.listening import accepted_all
from router.processes.member import Member

# A process with more connections than another one waits so long: both wake for a new connection, and the other accepts it.
BEHIND_SECONDS = 0.002


class SharedHttpServer(HttpServer):
    def __init__(
        self,
        config: uvicorn.Config,
        member: Member,
        seconds: float,
        max_silent: int,
        keys: ApiKeys | None = None,
    ):
        super().__init__(config, seconds, max_silent, keys)
        self._member = member

    async def _next(self, queues: AcceptQueues) -> Accepted:
        """The next connection; a process with more connections than others waits BEHIND_SECONDS for one of them."""
        while True:
            if not self._ahead():
                with contextlib.suppress(BlockingIOError):
                    return queues.accept()
            await readable(queues)
            if self._ahead():
                await asyncio.sleep(BEHIND_SECONDS)
                with contextlib.suppress(BlockingIOError):
                    return queues.accept()

    async def accept_last(self, listeners: Sequence[socket.socket]) -> None:
        """The parent has closed the sockets' queues: only it knows that no process goes on with them."""
        await accepted_all(listeners)

    def _ahead(self) -> bool:
        self._count_opening()
        return self._member.has_more_connections()

    def _count_opening(self) -> None:
        self._member.is_opening(len(self._silent) + len(self._ready) + len(self._handshakes))

    def _close_overdue(self) -> None:
        super()._close_overdue()
        self._count_opening()  # also where this process has accepted nothing since


def counted(protocol: type[LimitedProtocol], member: Member) -> type[LimitedProtocol]:
    """The protocol class with a limit of connections that holds for all processes together."""

    class Counted(protocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            member.has_connections(len(self.connections) + 1)  # before the others' are read
            super().connection_made(transport)
            member.has_connections(len(self.connections))

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            member.has_connections(len(self.connections))

        def _connection_limit(self) -> int:
            limit: int = super()._connection_limit()
            return max(0, limit - member.connections_elsewhere())

    return Counted
