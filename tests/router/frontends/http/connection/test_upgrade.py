"""Clients that offer to upgrade to another protocol are served in HTTP/1.1: with their body, and with pipelined
requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router.frontends.http.connection import protocol
from router.frontends.http.connection.protocol import LimitedProtocol
from tests.router.frontends.http.connection.cycles import CYCLES
from tests.router.frontends.http.connection.header_server import exchange, serving

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
LENGTH = b"content-length: 5\r\n\r\nhello"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n"


@pytest.fixture(params=CYCLES)
async def address(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    async with serving(request.param) as at:
        yield at


def request(offer: bytes, rest: bytes, *, name: bytes = b"1") -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\nx-own: " + name + b"\r\n" + offer + rest


def with_limits(monkeypatch, **changed):
    original = LimitedProtocol.connection_made

    def made(self, transport):
        self.limits = self.limits.model_copy(update=changed)
        original(self, transport)

    monkeypatch.setattr(LimitedProtocol, "connection_made", made)


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("rest", [LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_the_body_arrives(address, offer, rest):
    said = await exchange(address, request(offer, rest))
    assert said.startswith(b"HTTP/1.1 200") and b"\r\n\r\n5;" in said
    assert b"x-own=1" in said and b"x-trailer" not in said


@pytest.mark.parametrize("rest", [LENGTH, CHUNKED], ids=["length", "chunked"])
async def test_wherever_the_packets_end(address, rest):
    whole = request(H2C, rest)
    for end in range(1, len(whole), 7):
        assert b"\r\n\r\n5;" in await exchange(address, whole[:end], whole[end:])


async def test_a_request_without_a_body(address):
    said = await exchange(address, b"GET / HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n")
    assert said.startswith(b"HTTP/1.1 200") and b"\r\n\r\n0;" in said


async def test_the_requests_behind_it_are_served_too(address):
    reader, writer = await asyncio.open_connection(*address)
    offers = [H2C, b"", H2C, WEBSOCKET, b""]
    writer.write(b"".join(request(offer, LENGTH, name=b"%d" % i) for i, offer in enumerate(offers)))
    async with asyncio.timeout(30):
        for index in range(len(offers)):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            assert body.startswith(b"5;") and b"x-own=%d" % index in body
    writer.close()


@pytest.mark.parametrize("coding", [b"gzip", b"chunked, gzip"])
async def test_a_body_without_a_length_is_refused(address, coding, caplog):
    """The parser of the body says so while the exception of the head's is handled."""
    said = await exchange(address, request(H2C, b"transfer-encoding: " + coding + b"\r\n\r\n"))
    assert said.startswith(b"HTTP/1.1 400")
    assert not [one for one in caplog.records if one.name == "asyncio"], "no fatal error is logged"


async def test_a_thousand_in_one_packet_are_no_recursion(address, monkeypatch):
    with_limits(monkeypatch, max_header_bytes=1 << 20)
    monkeypatch.setattr(protocol, "MAX_PIPELINED", 1500)
    monkeypatch.setattr(protocol, "MAX_PIPELINED_BYTES", 1 << 21)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request(H2C, b"\r\n") * 1500)
    async with asyncio.timeout(30):
        for _ in range(1500):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()


@pytest.mark.parametrize(
    "wrong",
    [b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\nzz\r\n"],
)
async def test_invalid_values_are_refused_all_the_same(address, wrong):
    assert (await exchange(address, request(H2C, wrong))).startswith(b"HTTP/1.1 400")


async def test_a_body_that_does_not_come_has_its_deadline(address, monkeypatch):
    with_limits(monkeypatch, body_seconds=0.2)
    assert (await exchange(address, request(H2C, LENGTH[:-1]))).startswith(b"HTTP/1.1 408")
