"""A server with the limits of connections, in the test's own process, and clients of it that write bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import AsyncGenerator, AsyncIterator

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from cluster.config.router import ConnectionLimits
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.protocol import KEEPS, LimitedProtocol, limited
from tests.harness.waiting import until
from tests.router.frontends.http.connection.cycles import EveryRequest

LIMIT, HEADERS, HEAD_BYTES = 2, 5, 400
LIMITS = ConnectionLimits(
    max_http_connections=LIMIT, header_seconds=30, body_seconds=30, http_idle_seconds=30
).model_copy(update={"max_header_bytes": HEAD_BYTES, "max_headers": HEADERS})  # below what settings may be
GET = b"GET /at-once HTTP/1.1\r\nhost: x\r\n\r\n"


async def _pieces() -> AsyncIterator[bytes]:
    for piece in (b"one", b"two"):
        yield piece


class Server:
    def __init__(self, limits: ConnectionLimits = LIMITS, *, direct: bool = False) -> None:
        self.go_on = asyncio.Event()
        self.running = 0
        self.read_ahead = 0  # reads while requests waited behind a running one
        self.protocols: weakref.WeakSet[LimitedProtocol] = weakref.WeakSet()
        self._seen = 0
        self._made: list[Connection] = []
        server = self

        class Seen(limited(limits, EveryRequest(self._direct) if direct else {})):  # type: ignore[misc]
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                super().connection_made(transport)
                server._seen += 1
                server.protocols.add(self)

            def data_received(self, data: bytes) -> None:
                server.read_ahead += bool(self.pipeline)
                super().data_received(data)

        config = uvicorn.Config(self._app, http=Seen, interface="asgi3", log_config=None, lifespan="off")
        self._server = uvicorn.Server(config)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(Request(scope, receive, send))
        if scope["path"] == "/pieces":
            await StreamingResponse(_pieces())(scope, receive, send)
        else:
            await PlainTextResponse("answered")(scope, receive, send)

    async def _direct(self, exchange: Exchange) -> None:
        await self._run(exchange)
        if exchange.scope["path"] == "/pieces":
            exchange.begin(())
            one, two = [piece async for piece in _pieces()]
            exchange.write(one)
            await exchange.end(two)
        else:
            await exchange.send(PlainTextResponse("answered"))

    async def _run(self, request: Request) -> None:
        await request.body()
        scope = request.scope
        self.running += 1
        with scope[KEEPS]() if scope["path"] in ("/slow", "/gave-back") else contextlib.nullcontext():
            if scope["path"] in ("/slow", "/without-a-place"):
                await self.go_on.wait()
        if scope["path"] == "/gave-back":
            await self.go_on.wait()
        self.running -= 1

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def run(self) -> AsyncGenerator[Server]:
        sock = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        await until(lambda: self._server.started, "it serves")
        self._address = sock.getsockname()
        try:
            yield self
        finally:  # also where the caller ends this generator early
            self.go_on.set()
            for one in self._made:
                one.close()
            self._server.should_exit = True
            await serving

    async def connect(self, address: str = "127.0.0.1") -> Connection:
        """The server has seen it when this returns. `address`: the client's."""
        before = self._seen
        made = Connection(*await asyncio.open_connection(*self._address, local_addr=(address, 0)))
        self._made.append(made)
        await until(lambda: self._seen > before, "it is accepted", 5)
        return made


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    def send_no_more(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    async def status(self) -> int:
        """Of the next answer; 0 where the connection ends instead."""
        try:
            async with asyncio.timeout(10):
                head = await self._reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(head.split()[1])

    async def rest(self) -> bytes:
        """What comes until the connection ends."""
        async with asyncio.timeout(10):
            return await self._reader.read()

    async def ask(self, raw: bytes = GET) -> int:
        self.send(raw)
        return await self.status()


def head(headers: int, size: int) -> bytes:
    """Of a request with so many headers, which take `size` bytes as the limit counts them, with its path."""
    lines = ["host: ", *(f"h{number}: " for number in range(1, headers))]
    lines[-1] += (size - len("/at-once") - sum(len(one) - 2 + 4 for one in lines)) * "x"
    return ("GET /at-once HTTP/1.1\r\n" + "".join(f"{one}\r\n" for one in lines) + "\r\n").encode()
