"""Trailers of a chunked body are no headers: they have no effect, and their size is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cluster.config.router import ConnectionLimits
from router.frontends.http import short_chunks
from router.frontends.http.exchange import Exchange
from router.frontends.http.protocol import limited
from tests.harness.waiting import until
from tests.router.frontends.http.cycles import CYCLES, EveryRequest

LIMITS = ConnectionLimits(
    max_header_bytes=4096,
    max_headers=20,
    max_http_connections=10,
    header_seconds=30,
    body_seconds=30,
    write_seconds=30,
    http_idle_seconds=5,
)
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nx-own: 1\r\n\r\n"


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


@pytest.fixture(params=CYCLES)
async def address(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    http = limited(LIMITS, EveryRequest(direct) if request.param == "direct" else {})
    config = uvicorn.Config(app, http=http, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    sock = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await until(lambda: server.started, "it serves")
    yield sock.getsockname()
    server.should_exit = True
    await serving


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


TRAILERS = b"0\r\nauthorization: Bearer key\r\nx-own: 2\r\n\r\n"


@pytest.mark.parametrize("pieces", [(HEAD + b"3\r\nabc\r\n" + TRAILERS,), (HEAD, b"3\r\nabc\r\n", TRAILERS)])
async def test_trailers_are_dropped(address, pieces):
    answer = await exchange(address, *pieces)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"3;" in answer and b"x-own=1" in answer
    assert b"authorization" not in answer and b"x-own=2" not in answer


async def test_the_next_request_of_the_connection_has_its_headers(address):
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(30):
        for number in (b"1", b"2"):
            writer.write(HEAD.replace(b"x-own: 1", b"x-own: " + number) + b"3\r\nabc\r\n" + TRAILERS)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"x-own=" + number in await reader.readexactly(length)
    writer.close()


@pytest.mark.parametrize("begin", [b"0\r\nx-long: ", b"3;x="])
async def test_the_size_of_trailers_and_extensions_is_bounded(address, begin):
    """Otherwise an endless trailer or chunk extension would be buffered until the body's time limit."""
    answer = await exchange(address, HEAD, b"3\r\nabc\r\n" + begin, *[b"a" * 1024] * 64)
    assert answer.startswith(b"HTTP/1.1 431")


async def test_a_body_of_many_chunks_is_no_trailer(address):
    chunk = b"100\r\n" + b"a" * 256 + b"\r\n"
    answer = await exchange(address, HEAD, *[chunk * 50] * 20, b"0\r\n\r\n")
    assert b"256000;" in answer
    assert answer.startswith(b"HTTP/1.1 200")


async def test_pieces_of_a_body_without_chunks_are_no_short_chunks(address, monkeypatch):
    monkeypatch.setattr(short_chunks, "MAX_SHORT_CHUNKS", 2)
    head = HEAD.replace(b"transfer-encoding: chunked", b"content-length: 64")
    answer = await exchange(address, head, *[b"a"] * 64)
    assert answer.startswith(b"HTTP/1.1 200") and b"64;" in answer
