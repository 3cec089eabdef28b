"""Limits of connections: which are closed for new ones, which are refused, and the exact bounds of a head."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.frontends.http.connection import linger, protocol
from router.frontends.http.connection.pipelined import POLL_SECONDS
from router.frontends.http.connection.write_deadline import WriteDeadline
from tests.harness.waiting import until
from tests.router.frontends.http.connection.cycles import CYCLES
from tests.router.frontends.http.connection.own_server import (
    GET,
    HEAD_BYTES,
    HEADERS,
    LIMIT,
    LIMITS,
    Connection,
    Server,
    head,
)

POST = b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"
GAVE_BACK = b"GET /gave-back HTTP/1.1\r\nhost: x\r\n\r\n"
WITHOUT_A_PLACE = b"GET /without-a-place HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(params=CYCLES)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async for one in Server(direct=request.param == "direct").run():
        yield one


@pytest.mark.parametrize(
    ("server", "method", "body"),
    [("direct", b"GET", b"onetwo"), ("asgi", b"HEAD", b"")],
    indirect=["server"],
)
async def test_an_http_1_0_stream_has_no_chunks_and_ends_with_the_connection(
    method: bytes, body: bytes, server: Server
) -> None:
    """The application streams nothing."""
    connection = await server.connect()
    connection.send(method + b" /pieces HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
    head, _, came = (await connection.rest()).partition(b"\r\n\r\n")
    assert came == body
    assert b"transfer-encoding" not in head and b"connection: close" in head


async def test_an_http_1_0_answer_of_known_length_has_content_length(server: Server) -> None:
    connection = await server.connect()
    connection.send(b"GET /at-once HTTP/1.0\r\n\r\n")
    head, _, came = (await connection.rest()).partition(b"\r\n\r\n")
    assert came == b"answered" and b"content-length: 8" in head


async def test_an_http_1_1_stream_is_chunked(server: Server) -> None:
    connection = await server.connect()
    connection.send(b"GET /pieces HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, came = (await connection.rest()).partition(b"\r\n\r\n")
    assert came == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" and b"transfer-encoding: chunked" in head


@pytest.mark.parametrize(
    "sent", [b"", GET, POST, POST + GET], ids=["silent", "answered", "running", "with one that waits"]
)
async def test_nothing_is_left_of_a_connection_that_has_ended(sent: bytes, server: Server) -> None:
    """Before, its request's body was left, and a collection of the garbage of thousands held every stream for 0.3 s."""
    connection = await server.connect()
    gc.disable()
    try:
        if sent == GET:
            assert await connection.ask() == 200
        elif sent:
            connection.send(sent)
            await until(lambda: server.running == 1, "it runs", 5)
        left = _referred(server)
        connection.close()
        await until(lambda: not server.connections, "it has ended", 5)
        server.go_on.set()
        await until(lambda: not any(one() for one in left), "nothing is left", 5)
    finally:
        gc.enable()


def _referred(server: Server) -> list[weakref.ref[Any]]:
    """The connection and its requests."""
    (found,) = server.protocols
    cycles = [found.cycle, *(one for one, _ in found.pipeline)]
    return [weakref.ref(one) for one in (found, *cycles) if one is not None]


async def busy(server: Server) -> list[Connection]:
    """As many as the limit, each with a request that runs."""
    connections = [await server.connect() for _ in range(LIMIT)]
    for one in connections:
        one.send(SLOW)
    await until(lambda: server.running == LIMIT, "they run", 5)
    return connections


async def test_the_connection_that_has_waited_longest_makes_room(server: Server) -> None:
    first, second = await server.connect(), await server.connect()
    assert await first.ask() == 200, "now the second one has waited longest"
    third = await server.connect()
    assert await second.status() == 0
    assert await third.ask() == 200
    fourth = await server.connect()
    assert await first.status() == 0
    assert await fourth.ask() == 200 and await third.ask() == 200


async def test_a_flood_closes_connections_of_its_own_address(server: Server) -> None:
    kept = await server.connect()
    flood = [await server.connect("127.0.0.9") for _ in range(4 * LIMIT)]
    assert await kept.ask() == 200, "though it was idle for longer than any of the flood"
    assert [await one.status() for one in flood[:-1]] == [0] * (len(flood) - 1)
    assert await flood[-1].ask() == 200


async def test_a_connection_of_a_full_address_makes_room_for_the_first_of_another(server: Server) -> None:
    oldest, newest = [await server.connect() for _ in range(LIMIT)]
    assert await (await server.connect("127.0.0.9")).ask() == 200
    assert await oldest.status() == 0
    assert await newest.ask() == 200


async def test_a_connection_that_is_gone_makes_no_room(server: Server) -> None:
    gone = await server.connect()
    gone.close()
    await until(lambda: not server.connections, "it is gone", 5)
    await server.connect(), await server.connect()
    assert await (await server.connect()).ask() == 200


async def test_a_connection_whose_request_gave_its_place_back_makes_room(server: Server) -> None:
    """Refused requests had one for a moment, and their answers may stay unread."""
    connections = [await server.connect() for _ in range(LIMIT)]
    for one in connections:
        one.send(GAVE_BACK)
    await until(lambda: server.running == LIMIT, "they run", 5)
    assert await (await server.connect()).ask() == 200


async def test_a_connection_with_a_request_makes_no_room(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(protocol, "MAX_REFUSED", 1)
    running = await busy(server)
    assert await (await server.connect()).status() == 429
    refused = [await server.connect() for _ in range(4)]
    assert 0 in [await one.status() for one in refused], "more are closed at once, without an answer"
    server.go_on.set()
    assert [await one.status() for one in running] == [200] * LIMIT


async def test_a_connection_whose_request_has_no_place_makes_room(server: Server) -> None:
    """Also if a request behind it may take one."""
    connections = [await server.connect() for _ in range(LIMIT)]
    for one in connections:
        one.send(WITHOUT_A_PLACE)
    await until(lambda: server.running == LIMIT, "they run", 5)
    for one in connections:
        one.send(SLOW)
    await until(lambda: sum(len(one.pipeline) for one in server.protocols) == LIMIT, "they wait", 5)
    third = await server.connect()
    assert await connections[0].status() == 0
    assert await third.ask() == 200


async def test_a_request_with_a_place_behind_one_without_keeps_its_connection(server: Server) -> None:
    connections = [await server.connect() for _ in range(LIMIT)]
    for one in connections:
        one.send(WITHOUT_A_PLACE + SLOW)
    await until(lambda: server.running == LIMIT, "they run", 5)
    server.go_on.set()
    assert [await one.status() for one in connections] == [200] * LIMIT
    server.go_on.clear()
    for one in connections:
        one.send(SLOW)
    await until(lambda: server.running == LIMIT, "those behind them run", 5)
    assert await (await server.connect()).status() == 429


async def test_nothing_is_left_of_a_refused_client_that_is_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of such connections were held for write_seconds: a client made a gigabyte of them in that time."""
    waits_for_reading: list[object] = []
    monkeypatch.setattr(WriteDeadline, "start", waits_for_reading.append)
    for _ in range(5):
        one = await server.connect()
        one.send(b"no head\r\n\r\n")
        one.close()
        await until(lambda: not server.connections, "it is gone", 5)

    def few_are_left() -> bool:
        gc.collect()
        return len(server.protocols) <= 1

    await until(few_are_left, "asyncio may hold the last one", 5)
    await asyncio.sleep(1.2 * linger.QUIET_SECONDS)
    assert not waits_for_reading


@pytest.mark.parametrize(
    ("headers", "size", "status"),
    [
        (HEADERS, HEAD_BYTES // 2, 200),
        (HEADERS + 1, HEAD_BYTES // 2, 431),
        (HEADERS, HEAD_BYTES, 200),
        (HEADERS, HEAD_BYTES + 1, 431),
    ],
)
async def test_a_head_that_comes_at_once_has_a_size(
    headers: int, size: int, status: int, server: Server
) -> None:
    assert await (await server.connect()).ask(head(headers, size)) == status


async def test_a_head_that_comes_in_pieces_has_a_size(server: Server) -> None:
    one = await server.connect()
    one.send(b"GET / HTTP/1.1\r\nh: ")
    for _ in range(HEAD_BYTES // 10):
        one.send(b"x" * 10)
        await asyncio.sleep(0.001)
    assert await one.status() == 431


async def test_each_head_of_a_connection_has_the_whole_size(server: Server) -> None:
    one = await server.connect()
    for _ in range(5):
        raw = head(2, HEAD_BYTES // 2)
        one.send(raw[:100])
        await asyncio.sleep(0.01)
        assert await one.ask(raw[100:]) == 200


@pytest.mark.parametrize("direct", [False, True])
async def test_a_request_behind_another_has_its_time_for_the_body_once_it_runs(direct: bool) -> None:
    """Its body is not read before: the answer that runs must not end for it."""
    limits = LIMITS.model_copy(update={"body_seconds": 0.4})
    async for server in Server(limits, direct=direct).run():
        connection = await server.connect()
        connection.send(SLOW)
        await until(lambda one=server: one.running == 1, "it runs", 5)
        connection.send(b"POST /at-once HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nab")
        await asyncio.sleep(1.0)
        server.go_on.set()
        assert await connection.status() == 200
        assert await connection.status() == 408, "now it is late"


async def test_a_head_behind_a_body_has_its_own_time() -> None:
    """Not what was left of the body's: the answer that runs must not end for it."""
    async for server in Server(LIMITS.model_copy(update={"body_seconds": 0.4})).run():
        connection = await server.connect()
        connection.send(b"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab")
        await asyncio.sleep(0.05)
        connection.send(b"cd" + GET[:20])
        await until(lambda one=server: one.running == 1, "it runs", 5)
        await asyncio.sleep(1.0)
        server.go_on.set()
        assert await connection.status() == 200
        assert await connection.ask(GET[20:]) == 200


@pytest.mark.parametrize("late", [False, True])
async def test_a_head_behind_requests_that_wait_has_its_time_once_it_is_read(late: bool) -> None:
    """The connection is not read before: the answers that are made must not end for it."""
    async for server in Server(LIMITS.model_copy(update={"header_seconds": 0.4})).run():
        connection = await server.connect()
        connection.send(SLOW + GET + GET[:20])
        await until(lambda one=server: one.running == 1, "it runs", 5)
        await asyncio.sleep(1.0)
        server.go_on.set()
        assert await connection.status() == 200
        assert await connection.status() == 200
        if not late:
            connection.send(GET[20:])
        assert await connection.status() == (408 if late else 200)


async def test_requests_before_an_answer_have_a_number(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take no place, and each costs memory."""
    monkeypatch.setattr(protocol, "MAX_PIPELINED", 3)
    connection = await server.connect()
    connection.send(SLOW + 3 * GET)
    await until(lambda: server.running == 1, "it runs", 5)
    server.go_on.set()
    assert [await connection.status() for _ in range(4)] == [200] * 4
    server.go_on.clear()
    connection.send(SLOW)
    await until(lambda: server.running == 1, "it runs", 5)
    connection.send(4 * GET)
    assert [await connection.status() for _ in range(2)] == [429, 0]
    await until(lambda: not server.connections, "it is closed", 5)


async def test_no_more_is_read_while_requests_wait_for_an_answer(server: Server) -> None:
    """Each end of an answer read the next ones into memory."""
    connection = await server.connect()
    connection.send(SLOW + 20 * GET)
    await until(lambda: server.running == 1, "it runs", 5)
    connection.send(GET)
    await asyncio.sleep(0.05)
    server.go_on.set()
    assert [await connection.status() for _ in range(22)] == [200] * 22
    assert server.read_ahead == 0


@pytest.mark.parametrize("behind", [0, 1])
async def test_a_client_that_sends_no_more_is_answered(behind: int, server: Server) -> None:
    connection = await server.connect()
    connection.send(SLOW + behind * GET)
    connection.send_no_more()
    await until(lambda: server.running == 1, "it runs", 5)
    await asyncio.sleep(0.05)
    server.go_on.set()
    assert (await connection.rest()).count(b"answered") == 1 + behind
    await until(lambda: not server.connections, "it is closed", 5)


async def test_a_client_that_asks_for_a_head_and_sends_no_more_is_answered(server: Server) -> None:
    connection = await server.connect()
    connection.send(SLOW.replace(b"GET", b"HEAD"))
    connection.send_no_more()
    await until(lambda: server.running == 1, "it runs", 5)
    await asyncio.sleep(0.05)
    server.go_on.set()
    assert (await connection.rest()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("end", ["", "the body", "the head"])
async def test_the_end_of_a_client_ends_its_generation(end: str, server: Server) -> None:
    """A client that left looks the same."""
    connection = await server.connect()
    raw = SLOW.replace(b"GET", b"POST")
    connection.send({"": raw, "the head": GET[:-2], "the body": raw[:-2] + b"content-length: 5\r\n\r\n"}[end])
    await until(lambda: end or server.running == 1, "it runs", 5)
    connection.send_no_more()
    assert await connection.rest() == b""
    await until(lambda: not server.connections, "it is closed", 5)


async def test_the_end_of_a_client_ends_its_generation_though_a_request_waits_behind_it(
    server: Server,
) -> None:
    """The socket is not read meanwhile, so the request ran on to its end."""
    connection = await server.connect()
    connection.send(SLOW.replace(b"GET", b"POST") + GET)
    await until(lambda: server.running == 1, "it runs", 5)
    connection.close()
    await until(lambda: not server.connections, "it is closed", 5)
    assert server.running == 1, "the application hears of it where it waits for the client"


async def test_a_waiting_request_is_answered_though_its_client_sends_no_more(server: Server) -> None:
    connection = await server.connect()
    connection.send(SLOW + GET)
    connection.send_no_more()
    await until(lambda: server.running == 1, "it runs", 5)
    await asyncio.sleep(3 * POLL_SECONDS)
    server.go_on.set()
    assert (await connection.rest()).count(b"answered") == 2


async def test_bytes_before_an_answer_have_a_number(server: Server) -> None:
    connection = await server.connect()
    connection.send(SLOW)
    await until(lambda: server.running == 1, "it runs", 5)
    connection.send(b"POST /at-once HTTP/1.1\r\nhost: x\r\ncontent-length: 99000\r\n\r\n" + bytes(99000))
    assert [await connection.status() for _ in range(2)] == [429, 0]


async def test_the_length_of_a_head_does_not_depend_on_what_came_before(server: Server) -> None:
    """All of it came in one read with the end of the request before."""
    connection = await server.connect()
    body = bytes(2 * HEAD_BYTES)
    first = b"POST /at-once HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.send(first + body + GET[:-4])
    assert await connection.status() == 200
    connection.send(GET[-4:])
    assert await connection.status() == 200
