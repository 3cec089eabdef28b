"""Waiting for sockets on the event loop."""

from __future__ import annotations

import asyncio
import socket


async def readable(sock: socket.socket) -> None:
    """Return once bytes, a connection or the peer's end wait there. Nothing is read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
