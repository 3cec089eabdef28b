"""Sends the TCP connections of an event loop's `sock_connect`, which opens the links, through the proxy of a test, as
`grpc_proxy` does for gRPC's.

Python imports this module at its start where its directory is on PYTHONPATH: see `RunningProxy.environment`. The product
has no such setting, because no deployment needs one.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import uvloop

PROXY = os.environ.get("BATON_TEST_PROXY", "")


def install(proxy: tuple[str, int]) -> None:
    direct = uvloop.Loop.sock_connect

    async def sock_connect(loop: Any, connecting: socket.socket, address: Any) -> None:
        """Raises ConnectionRefusedError if the proxy does not reach the address, ConnectionResetError if it resets."""
        await direct(loop, connecting, proxy)
        request = f"CONNECT {address[0]}:{address[1]} HTTP/1.1\r\n\r\n"
        await loop.sock_sendall(connecting, request.encode())
        reply = b""
        while not reply.endswith(b"\r\n\r\n"):
            piece = await loop.sock_recv(connecting, 1)  # what follows the reply belongs to the connection
            if not piece:
                raise ConnectionRefusedError(f"{address} was not reached")
            reply += piece

    uvloop.Loop.sock_connect = sock_connect  # type: ignore[method-assign, assignment]


if PROXY:
    host, _, port = PROXY.rpartition(":")
    install((host, int(port)))
