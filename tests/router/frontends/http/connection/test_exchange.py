"""Answers that are written straight to their connection: when the client leaves, reads on, or asks again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse, Response

from cluster.config.router import ConnectionLimits
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.connection.long_body import SLICE_BYTES
from router.frontends.http.connection.protocol import limited
from tests.harness.waiting import until
from tests.router.frontends.http.connection.cycles import EveryRequest

LIMITS = ConnectionLimits(max_http_connections=10)
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
PIECE = b"x" * 65536
Endpoint = Callable[[Exchange], Awaitable[None]]


class Noted:
    """Notes what an exchange tells its watcher."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.has_disconnected = False
        self.resumed_times = 0

    def disconnected(self) -> None:
        self.has_disconnected = True

    def resumed(self) -> None:
        self.resumed_times += 1


class Served:
    """A server whose requests are held until `go_on`, with what was noted of each."""

    def __init__(self) -> None:
        self.noted: list[Noted] = []
        self.begun = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.draining = False
        self.read_body = True
        self.answer: Callable[[Exchange], Awaitable[None]] = lambda exchange: exchange.send(
            PlainTextResponse("ok")
        )
        self.finish = asyncio.Event()
        self.finish.set()

    async def endpoint(self, exchange: Exchange) -> None:
        if self.read_body:
            await exchange.body()
        self.begun += 1
        await self.go_on.wait()
        noted = Noted(exchange)
        exchange.watch(noted)
        self.noted.append(noted)
        await self.answer(exchange)
        await self.finish.wait()
        exchange.unwatch()

    @contextlib.asynccontextmanager
    async def connection(
        self, raw: bytes = GET
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Of a client that has sent this."""
        async with self.serving() as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(raw)
            try:
                yield reader, writer
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[str, int]]:
        http = limited(LIMITS, EveryRequest(self.endpoint), lambda: self.draining)
        config = uvicorn.Config(_never, http=http, interface="asgi3", log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        sock = socket.create_server(("127.0.0.1", 0))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started, "it serves")
        self.connections = server.server_state.connections
        try:
            yield sock.getsockname()
        finally:
            self.go_on.set()
            self.finish.set()
            server.should_exit = True
            await serving


async def _never(scope: object, receive: object, send: object) -> None:
    raise AssertionError("every request is answered directly")


@pytest.fixture
def served() -> Served:
    return Served()


async def wait(exchange: Exchange) -> None:
    """Answer nothing yet."""


@pytest.mark.parametrize("size", [0, 10, 200_000])
async def test_a_client_that_leaves_is_noticed(size: int, served: Served) -> None:
    """Also after a long body, at whose end the socket is not read."""
    served.answer = wait
    served.finish.clear()
    raw = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)
    async with served.connection(raw) as (_, writer):
        await until(lambda: served.noted, "it is watched", 5)
        assert not served.noted[0].has_disconnected
        writer.close()
        await until(lambda: served.noted[0].has_disconnected, "it is told", 5)
        await served.noted[0].exchange.send(PlainTextResponse("too late"))
        assert not served.noted[0].exchange.begun


async def test_a_client_that_left_before_its_answer_is_noticed(served: Served) -> None:
    served.go_on.clear()
    served.answer = wait
    async with served.connection(GET.replace(b"GET", b"POST")) as (_, writer):
        await until(lambda: served.begun, "its request runs", 5)
        writer.close()
        await until(lambda: not served.connections, "it is gone", 5)
        served.go_on.set()
        await until(lambda: served.noted, "it is watched", 5)
        assert served.noted[0].has_disconnected
        # uvloop's transport raises where it is written to after its end, and the log had an exception per such client.
        served.noted[0].exchange.begin(())
        assert not served.noted[0].exchange.begun


async def test_an_answer_pauses_until_its_client_has_read(served: Served) -> None:
    async def fill(exchange: Exchange) -> None:
        exchange.begin(())
        while not exchange.paused:
            exchange.write(PIECE)

    served.answer = fill
    served.finish.clear()
    loop = asyncio.get_running_loop()
    async with served.serving() as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, GET)
            await until(lambda: served.noted, "it is watched", 5)
            (noted,) = served.noted
            await asyncio.sleep(0.05)
            assert noted.exchange.paused and not noted.resumed_times
            async with asyncio.timeout(10):
                while not noted.resumed_times:
                    await loop.sock_recv(client, 65536)
                assert not noted.exchange.paused
                await noted.exchange.end(b"the end")
                left = b""
                while not left.endswith(b"the end\r\n0\r\n\r\n"):
                    left = left[-100:] + await loop.sock_recv(client, 65536)


@pytest.mark.parametrize("leaves", [False, True])
async def test_long_pieces_of_a_stream_are_made_as_the_client_reads(served: Served, leaves: bool) -> None:
    """Also for a client that reads all at once, a slice per turn of the loop; none is made for one that has left."""
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for i in range(40):
            made.append(i)
            yield b"%03d" % i + bytes(SLICE_BYTES - 3)

    async def stream(exchange: Exchange) -> None:
        exchange.begin(())
        exchange.write(b"first")
        exchange.write(pieces())
        exchange.write(b"second")
        assert exchange.paused and len(made) <= 1
        await exchange.written()
        await exchange.end(b"third" + bytes(2 * SLICE_BYTES))

    served.answer = stream
    async with served.serving() as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, GET)
            await until(lambda: made, "it is written", 5)
            await asyncio.sleep(0.05)
            assert len(made) < 30, "the kernel's buffers and the transport's take a few"
            if leaves:
                client.close()
                await until(lambda: served.noted[0].has_disconnected, "it is told", 5)
                assert len(made) < 30 and not served.noted[0].exchange.paused
                return
            got = bytearray()
            async with asyncio.timeout(10):
                while not got.endswith(b"\r\n0\r\n\r\n"):
                    got += await loop.sock_recv(client, 1 << 20)
    body, rest = bytearray(), got.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    starts = [bytes(body[5 + i * SLICE_BYTES :][:3]) for i in range(40)]
    assert body[:5] == b"first" and starts == [b"%03d" % i for i in range(40)]
    assert body[5 + 40 * SLICE_BYTES :] == b"second" + b"third" + bytes(2 * SLICE_BYTES)


async def test_a_stream_whose_pieces_cannot_be_made_ends_its_connection(served: Served) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(SLICE_BYTES)
        raise ValueError("on purpose")

    async def stream(exchange: Exchange) -> None:
        exchange.begin(())
        exchange.write(pieces())
        await exchange.written()

    served.answer = stream
    async with served.connection() as (reader, _):
        assert not (await asyncio.wait_for(reader.read(), 10)).endswith(b"\r\n0\r\n\r\n")


async def test_a_short_first_piece_leaves_with_the_head(served: Served) -> None:
    """Each write is a system call, and wakes the client."""
    writes: list[bytes] = []

    async def stream(exchange: Exchange) -> None:
        transport = exchange._transport
        exchange._transport = cast(Any, SimpleNamespace(write=writes.append))
        exchange.begin((), b"first")
        exchange._transport = transport
        transport.write(b"".join(writes))
        await exchange.end(b"the end")

    served.answer = stream
    async with served.connection() as (reader, _):
        came = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
    assert len(writes) == 1
    assert came.endswith(b"\r\n\r\n5\r\nfirst\r\n7\r\nthe end\r\n0\r\n\r\n")


async def test_what_happens_later_is_not_told_to_a_request_that_was_answered(served: Served) -> None:
    served.finish.clear()
    async with served.connection() as (reader, writer):
        await asyncio.wait_for(reader.readuntil(b"ok"), 5)
        writer.close()
        await until(lambda: not served.connections, "it is gone", 5)
        assert not served.noted[0].has_disconnected


@pytest.mark.parametrize("draining", [False, True])
async def test_a_server_that_leaves_closes_the_connection_after_the_answer(
    draining: bool, served: Served
) -> None:
    served.draining = draining
    async with served.connection() as (reader, _):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert (b"connection: close" in head) is draining
        assert await reader.readexactly(2) == b"ok"
        if draining:
            assert await asyncio.wait_for(reader.read(), 5) == b""


async def test_a_response_may_close_the_connection(served: Served) -> None:
    served.answer = lambda exchange: exchange.send(Response(b"bye", headers={"connection": "close"}))
    async with served.connection() as (reader, _):
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.count(b"connection: close\r\n") == 1 and answer.endswith(b"\r\n\r\nbye")


async def test_added_headers_go_with_any_answer(served: Served) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.add_headers([(b"vary", b"Origin")])
        await exchange.send(PlainTextResponse("ok"))

    served.answer = answer
    async with served.connection() as (reader, _):
        assert b"vary: Origin\r\n" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)


async def test_a_value_cannot_add_a_header(served: Served) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.begin([(b"x-worker", b"a\r\nset-cookie: b")])

    served.answer = answer
    async with served.connection() as (reader, _):
        assert b"set-cookie" not in await asyncio.wait_for(reader.read(), 5)


async def test_no_second_answer_follows_a_stream_that_failed(served: Served) -> None:
    async def answer(exchange: Exchange) -> None:
        exchange.begin(())
        exchange.write(b"some")
        await exchange.send(PlainTextResponse("internal error", 500))

    served.answer = answer
    async with served.connection() as (reader, _):
        answer_ = await asyncio.wait_for(reader.read(), 5)
        assert answer_.endswith(b"4\r\nsome\r\n"), "it is cut, not ended"


async def test_the_body_is_asked_for_where_the_client_waits(served: Served) -> None:
    raw = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    async with served.connection(raw) as (reader, writer):
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), 5)).startswith(b"HTTP/1.1 200")


async def test_a_body_that_arrives_after_its_answer_is_no_request(served: Served) -> None:
    served.read_body = False
    raw = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n"
    async with served.connection(raw) as (reader, writer):
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), 5)).startswith(b"HTTP/1.1 200")
        writer.write(b"too late!" + GET)
        assert (await asyncio.wait_for(reader.readuntil(b"ok"), 5)).startswith(b"HTTP/1.1 200")
        assert served.begun == 2


async def test_an_answer_waits_until_those_before_it_are_read(served: Served) -> None:
    """Else a client that sends many requests, and reads nothing, would have all their answers held in memory."""
    requests, body = 20, b"x" * 200_000
    served.answer = lambda exchange: exchange.send(Response(body))
    loop = asyncio.get_running_loop()
    async with served.serving() as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, requests * GET)
            await until(lambda: served.begun > 1, "the second one runs", 5)
            await asyncio.sleep(0.1)
            assert served.begun < 4
            left = requests * len(body)
            async with asyncio.timeout(20):
                while left > 0:
                    left -= len(await loop.sock_recv(client, 1 << 20))
            assert served.begun == requests


async def test_a_long_answer_is_written_as_its_client_reads(served: Served) -> None:
    """With TLS one write would be encrypted as a whole, and pause nothing."""
    body, transports, ended = b"x" * 3_000_000, list[asyncio.Transport](), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        transports.append(exchange._transport)
        await exchange.send(Response(body))
        await exchange.sent()
        ended.set()

    served.answer = answer
    loop = asyncio.get_running_loop()
    async with served.serving() as address:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, GET)
            await until(lambda: transports, "it is answered", 5)
            await asyncio.sleep(0.05)
            assert 0 < transports[0].get_write_buffer_size() <= SLICE_BYTES + 65536 and not ended.is_set()
            left = len(body)
            async with asyncio.timeout(20):
                while left > 0:
                    left -= len(await loop.sock_recv(client, 1 << 20))
                await ended.wait()


async def test_an_answer_that_closes_reaches_a_client_that_still_sends(served: Served) -> None:
    """As the refusal of a key. Closed at once, the connection was reset below the body, and the reason was lost for
    clients that send all of a body before they read."""
    served.read_body = False
    served.answer = lambda exchange: exchange.send(Response(b"bye", headers={"connection": "close"}))
    body = bytes(16 << 20)  # more than the buffers of both ends take
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with served.connection(head) as (reader, writer):
        async with asyncio.timeout(20):
            writer.write(body)
            await writer.drain()
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"\r\n\r\nbye")
        await until(lambda: not served.connections, "it is closed", 5)
