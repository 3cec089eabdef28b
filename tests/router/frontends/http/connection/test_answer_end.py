"""Answers of the ASGI application that close their connection reach clients that still send."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.config.router import ConnectionLimits
from router.frontends.http.connection.linger import QUIET_SECONDS
from router.frontends.http.connection.protocol import LimitedProtocol, limited
from tests.harness.waiting import until
from tests.router.frontends.http.connection.own_server import LIMIT, Server

BODY_BYTES = 16 << 20  # more than the buffers of both ends take


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """As the gate, which refuses a request by its head, and endpoints that read no body."""
    ends = {"connection": "close"} if scope["path"] == "/refused" else {}
    await Response(b"bye", headers=ends)(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(*, draining: bool = False) -> AsyncIterator[uvicorn.Server]:
    http = limited(ConnectionLimits(max_http_connections=10), draining=lambda: draining)
    server = uvicorn.Server(uvicorn.Config(app, http=http, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, "it serves")
        yield server
        server.should_exit = True
        await task


async def answer_to(server: uvicorn.Server, head: bytes, body: bytes) -> bytes:
    """All that a client reads which sends all of the body first."""
    reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
    try:
        async with asyncio.timeout(20):
            writer.write(head + b"host: x\r\ncontent-length: %d\r\n\r\n" % BODY_BYTES)
            writer.write(body)
            await writer.drain()
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "draining"),
    [(b"POST /refused HTTP/1.1\r\n", False), (b"POST / HTTP/1.1\r\n", True), (b"POST / HTTP/1.0\r\n", False)],
    ids=["refused", "draining", "HTTP/1.0"],
)
async def test_an_answer_that_closes_reaches_a_client_that_still_sends(head: bytes, draining: bool) -> None:
    """Without a key, an upload to a path that is none of the generations' ended with a reset in place of the reason."""
    async with serving(draining=draining) as server:
        said = await answer_to(server, head, bytes(BODY_BYTES))
        assert said.startswith(b"HTTP/1.1 200 ") and said.endswith(b"\r\n\r\nbye")
        await until(lambda: not server.server_state.connections, "it is closed", 5)


async def test_what_comes_behind_such_an_answer_is_no_request() -> None:
    async with serving() as server:
        rest = bytes(BODY_BYTES) + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        said = await answer_to(server, b"POST /refused HTTP/1.1\r\n", rest)
        assert said.count(b"HTTP/1.1 ") == 1


async def test_a_client_that_sends_slowly_is_not_reset_before_it_has_sent_all() -> None:
    pieces, loop = 12, asyncio.get_running_loop()
    head = b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % pieces
    async with serving() as server:
        with socket.create_connection(server.servers[0].sockets[0].getsockname()) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, head)
            for _ in range(pieces):
                await asyncio.sleep(QUIET_SECONDS / 4)
                await loop.sock_sendall(client, b"x")
            async with asyncio.timeout(20):
                assert (await loop.sock_recv(client, 4096)).endswith(b"\r\n\r\nbye")
                assert await loop.sock_recv(client, 4096) == b""


async def test_a_body_that_nobody_reads_is_not_kept_while_a_client_sends() -> None:
    """4,000 clients without a key, each with a byte now and then, kept 250 MB for a minute."""
    head, begun = b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: 99999\r\n\r\n", bytes(50_000)
    async with serving() as server:
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        writer.write(head + begun)
        assert (await reader.readuntil(b"\r\n\r\nbye")).startswith(b"HTTP/1.1 200 ")
        (connection,) = server.server_state.connections
        assert isinstance(connection, LimitedProtocol) and not connection.cycle.body
        writer.close()


async def test_a_client_too_many_does_not_stay_by_sending_on() -> None:
    """While it does, each new connection closes an idle one, and is refused itself."""
    async with contextlib.aclosing(Server().run()) as servers:
        server = await anext(servers)
        for _ in range(LIMIT):  # each with a place
            (await server.connect()).send(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.running == LIMIT, "they run", 5)
        refused = await server.connect()
        assert await refused.status() == 429
        began = time.monotonic()
        while server.connections > LIMIT and time.monotonic() - began < 10 * QUIET_SECONDS:
            refused.send(b"x")
            await asyncio.sleep(QUIET_SECONDS / 5)
        assert server.connections == LIMIT
