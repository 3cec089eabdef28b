"""uvicorn on connections that are accepted a few in a turn of the event loop, with TLS handshakes bounded in number and
time: a protocol, and so its limits, begins only after one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from typing import Any

import uvicorn

# At a time; the oldest makes room.
MAX_HANDSHAKES = 256
RETRY_SECONDS = 0.05
ACCEPTS_PER_TURN = 128  # fewer leave newcomers behind a flood in the backlog, more hold up streams


class HttpServer(uvicorn.Server):
    """Accepts connections itself: uvloop accepts all that wait in one turn, and thousands would hold up every stream."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float):
        super().__init__(config)
        self._seconds = handshake_seconds
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        loop = asyncio.get_running_loop()
        self._accepting = [loop.create_task(self._accept(listener)) for listener in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        tasks = [*self._accepting, *self._handshakes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        for count in itertools.count(1):
            if count % ACCEPTS_PER_TURN == 0:
                await asyncio.sleep(
                    0
                )  # while connections wait, `sock_accept` returns without giving up the turn
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:  # of the client, or no descriptor is free: then this must not spin
                await asyncio.sleep(RETRY_SECONDS)
                continue
            task = loop.create_task(self._open(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            if len(self._handshakes) > MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()

    async def _open(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        handshake: dict[str, Any] = {}
        if self.config.ssl:
            handshake = {"ssl": self.config.ssl, "ssl_handshake_timeout": self._seconds}
        with contextlib.suppress(OSError):  # a failed handshake: ssl.SSLError and TimeoutError are OSErrors
            await loop.connect_accepted_socket(self._protocol, connection, **handshake)

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
