"""A server that answers with the headers and the size of the body that it has seen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.config.router import ConnectionLimits
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.protocol import limited
from tests.harness.waiting import until
from tests.router.frontends.http.connection.cycles import EveryRequest

LIMITS = ConnectionLimits(
    max_header_bytes=4096,
    max_headers=20,
    max_http_connections=10,
    header_seconds=30,
    body_seconds=30,
    write_seconds=30,
    http_idle_seconds=5,
)


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the headers that it has seen, once the body is complete."""
    await (await answer(Request(scope, receive, send)))(scope, receive, send)


async def direct(exchange: Exchange) -> None:
    """The same without the application."""
    await exchange.send(await answer(exchange))


async def answer(request: Request) -> PlainTextResponse:
    body = await request.body()
    said = ",".join(f"{name}={value}" for name, value in request.headers.items())
    return PlainTextResponse(f"{len(body)};{said}")


@contextlib.asynccontextmanager
async def serving(cycle: str) -> AsyncIterator[tuple[str, int]]:
    """The server's address. `cycle`: one of CYCLES."""
    http = limited(LIMITS, EveryRequest(direct) if cycle == "direct" else {})
    config = uvicorn.Config(app, http=http, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    sock = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started, "it serves")
    yield sock.getsockname()
    server.should_exit = True
    await task


async def exchange(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Send a request in these pieces; its answer must arrive while the connection is still open."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(30):
            for piece in pieces:
                writer.write(piece)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                await asyncio.sleep(0)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return head + await reader.readexactly(length)
    finally:
        writer.close()
