"""Trailers of a chunked body are no headers: they have no effect, and their size is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.frontends.http.connection import short_chunks
from tests.router.frontends.http.connection.cycles import CYCLES
from tests.router.frontends.http.connection.header_server import exchange, serving

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nx-own: 1\r\n\r\n"
TRAILERS = b"0\r\nauthorization: Bearer key\r\nx-own: 2\r\n\r\n"


@pytest.fixture(params=CYCLES)
async def address(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    async with serving(request.param) as at:
        yield at


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


async def test_chunks_that_reads_cut_are_no_short_chunks(address, monkeypatch):
    """Segments of a network, and the buffer that connections are read into, end anywhere."""
    monkeypatch.setattr(short_chunks, "MAX_SHORT_CHUNKS", 2)
    chunk = b"%x\r\n" % 300 + b"a" * 300 + b"\r\n"
    sent = chunk * 60 + b"0\r\n\r\n"
    pieces = [sent[at : at + 450] for at in range(0, len(sent), 450)]
    answer = await exchange(address, HEAD, *pieces)
    assert answer.startswith(b"HTTP/1.1 200") and b"18000;" in answer
