"""uvicorn's server on connections that our listener accepts."""

from __future__ import annotations

import asyncio
import socket
import ssl

import uvicorn

from router.http.listener import Listener, Place
from router.http.protocol import LimitedProtocol


class HttpServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None):
        super().__init__(config)
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        protocol = self.config.http_protocol_class
        assert isinstance(protocol, type) and issubclass(protocol, LimitedProtocol), "see router/server.py"

        def make(place: Place) -> asyncio.Protocol:
            return protocol(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                place=place,
            )

        limits = protocol.limits
        self.servers = [
            Listener(sock, make, limits.connections, self._context, limits.header_seconds)  # type: ignore[misc]
            for sock in sockets or ()
        ]
        self.started = True
