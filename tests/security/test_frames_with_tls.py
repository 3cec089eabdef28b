"""Frames of a worker leave one after the other, with TLS as without, though the router sends nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from cluster.faults.points import nothing
from cluster.security.peer_names import WORKER_NAME
from cluster.security.tls import Peers
from tests.security.identities import identity
from tests.worker.link.counted_session import AnyPort, CountedSession
from worker.link.connection import SEND_BUFFER_BYTES, Connection

FRAME = b"f" * 100
LARGE = b"l" * (64 * SEND_BUFFER_BYTES)
SECONDS = 20.0


class WritingSession(CountedSession):
    def __init__(self, connection: Connection, ended: asyncio.Event) -> None:
        super().__init__()
        self.connection = connection
        self.closed = ended.set  # type: ignore[method-assign]
        self.frame = FRAME

    def flush(self) -> None:
        super().flush()
        self.connection.write(self.frame)


class SilentRouter(threading.Thread):
    """Reads, as many bytes as it is asked for, and writes nothing after the handshake."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None):
        super().__init__(daemon=True)
        self._socket = socket.create_connection(address, SECONDS)
        self._context = context
        self.start()

    def run(self) -> None:
        if self._context is not None:
            self._socket = self._context.wrap_socket(self._socket, server_hostname=WORKER_NAME)

    async def read(self, size: int) -> bytes:
        def exactly() -> bytes:
            self.join()
            found = b""
            while len(found) < size:
                found += self._socket.recv(min(size - len(found), 1 << 16))
            return found

        return await asyncio.to_thread(exactly)

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_frame_leaves_though_the_router_has_sent_nothing_since_the_last(tls: bool, certs: Path) -> None:
    ours = certs / "ours"
    listening = Peers(identity(ours, "worker")).link_listener() if tls else None
    context = Peers(identity(ours, "router")).link_context() if tls else None

    async def exchange() -> None:
        session_closed = asyncio.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            router = SilentRouter(listener.getsockname(), context)
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            made: list[Any] = []

            def session(connection: Connection) -> Any:
                made.append(WritingSession(connection, session_closed))
                return made[0]

            connection = Connection(
                session, AnyPort(), accepted, listening.context if listening else None, nothing
            )
            await connection._opening
            for number in range(1, 4):
                connection.schedule()
                assert await asyncio.wait_for(router.read(len(FRAME)), SECONDS) == FRAME, number
            made[0].frame = LARGE
            connection.schedule()
            await asyncio.sleep(0)
            made[0].frame = FRAME
            for _ in range(9):
                connection.schedule()
                await asyncio.sleep(0)
            # With TLS, uvloop counts what a frame has left unwritten when the next one is written.
            assert made[0].frames == (5 if tls else 4), "while it is unwritten no other follows"
            assert await asyncio.wait_for(router.read(len(LARGE)), SECONDS) == LARGE
            assert await asyncio.wait_for(router.read(len(FRAME)), SECONDS) == FRAME, "which then leaves"
            connection.abort()
            router.close()
            await asyncio.wait_for(session_closed.wait(), SECONDS)

    # Not closed: uvloop's `close` does not return here after a TLS connection.
    uvloop.new_event_loop().run_until_complete(asyncio.wait_for(exchange(), 3 * SECONDS))
