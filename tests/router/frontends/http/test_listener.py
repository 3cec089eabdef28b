"""Connections to the HTTP port are opened a few per turn of the event loop; none is dropped for the number of others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse

from baton.local.certs import make_certs
from cluster.security.tls import ClientTls
from router.frontends.http.listener import MAX_HANDSHAKES, HttpServer
from tests.harness.waiting import until

SILENT = 4 * MAX_HANDSHAKES
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[str, int]]:
    app = PlainTextResponse("answered")
    made = uvicorn.Config(app, interface="asgi3", log_config=None, lifespan="off", **config)
    server = HttpServer(made, seconds=30.0, max_silent=SILENT)
    with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener:
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, "it serves")
        yield listener.getsockname()
        server.should_exit = True
        await running


async def test_requests_that_arrive_in_one_turn_are_all_answered() -> None:
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving())
        clients = [stack.enter_context(socket.socket()) for _ in range(2 * MAX_HANDSHAKES + 10)]
        for client in clients:
            client.setblocking(False)
            await loop.sock_connect(client, address)
        for client in clients:  # in one turn of the server's loop, which is this one
            client.send(GET)
        for client in clients:
            async with asyncio.timeout(20):
                assert (await loop.sock_recv(client, 12)) == b"HTTP/1.1 200"


async def test_more_handshakes_than_may_run_at_a_time_all_end(tmp_path: Path) -> None:
    """Clients that go on with theirs: only few are begun per turn, so none of these is ever the oldest of too many."""
    make_certs(tmp_path, [], 1)
    trust = ClientTls(tmp_path / "ca.pem").context()
    own = {"ssl_certfile": tmp_path / "router.pem", "ssl_keyfile": tmp_path / "router.key"}
    async with serving(**own) as (host, port):

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection(host, port, ssl=trust)
            writer.write(GET)
            answer = await reader.readexactly(12)
            writer.close()
            return answer

        answers = await asyncio.gather(*(ask() for _ in range(2 * MAX_HANDSHAKES)))
    assert set(answers) == {b"HTTP/1.1 200"}
