"""Connections to the HTTP port are opened a few per turn of the event loop; none is dropped for the number of others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import PlainTextResponse

from baton.local.certs import make_certs
from cluster.config.router import RouterConfig
from cluster.security.tls import ClientTls
from router.frontends.http.connection import listener as http_listener
from router.frontends.http.connection.listener import (
    ACCEPTS_PER_TURN,
    HANDSHAKES_PER_TURN,
    MAX_HANDSHAKES,
    OPENED_PER_TURN,
    HttpServer,
)
from router.frontends.http.connection.silent import SilentConnections
from router.listening import listen_http
from tests.harness.waiting import turns, until

SILENT = 4 * MAX_HANDSHAKES
GET = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def server_of(max_silent: int, **config: Any) -> HttpServer:
    app = PlainTextResponse("answered")
    made = uvicorn.Config(app, interface="asgi3", log_config=None, lifespan="off", **config)
    return HttpServer(made, seconds=30.0, max_silent=max_silent)


@contextlib.asynccontextmanager
async def running(server: HttpServer, *listeners: socket.socket) -> AsyncIterator[None]:
    serving = asyncio.create_task(server.serve(sockets=list(listeners)))
    try:
        await until(lambda: server.started, "it serves")
        yield
    finally:
        server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener:
        async with running(server_of(SILENT, **config), listener):
            yield listener.getsockname()


@contextlib.contextmanager
def connected(
    listener: socket.socket, number: int, source: str = "127.0.0.1"
) -> Iterator[list[socket.socket]]:
    """Clients that wait to be accepted."""
    where = listener.getsockname()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(where, source_address=(source, 0)))
            for _ in range(number)
        ]
        for client in clients:
            client.setblocking(False)
        yield clients


async def answer(client: socket.socket) -> bytes:
    async with asyncio.timeout(20):
        return await asyncio.get_running_loop().sock_recv(client, 12)


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
            assert await answer(client) == b"HTTP/1.1 200"


async def most_accepted_in_a_turn(max_silent: int) -> int:
    """The most of 100 connections that one turn of the event loop accepts."""
    server, loop = server_of(max_silent), asyncio.get_running_loop()
    accepted: list[int] = []  # by turn
    begin = server._make_room

    def make_room() -> None:
        accepted[-1] += 1
        begin()

    def next_turn() -> None:
        accepted.append(0)
        handles.append(loop.call_soon(next_turn))

    server._make_room = make_room  # type: ignore[method-assign]
    handles: list[asyncio.Handle] = []
    next_turn()
    with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener:
        with connected(listener, 100):
            async with running(server, listener):
                await until(lambda: sum(accepted) == 100, "all are accepted")
        handles[-1].cancel()
    return max(accepted)


@pytest.mark.parametrize(("max_silent", "a_turn"), [(1, 1), (7, 1), (8, 2), (40, 10), (1000, 32)])
async def test_connections_accepted_in_one_turn_are_few_beside_the_limit(
    max_silent: int, a_turn: int
) -> None:
    assert await most_accepted_in_a_turn(max_silent) == a_turn


def test_the_routers_own_event_loop_accepts_as_many_per_turn() -> None:
    """It took one: on a loop with long turns, new clients waited in the backlog for seconds."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(most_accepted_in_a_turn(1000)) == ACCEPTS_PER_TURN


async def test_a_flood_of_requests_is_answered_where_few_connections_may_be_silent() -> None:
    """32 accepted in one turn closed each other before their bytes were read."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener,
        connected(listener, 100) as clients,
    ):
        for client in clients:
            client.send(GET)
        async with running(server_of(4), listener):
            for client in clients:
                assert await answer(client) == b"HTTP/1.1 200"


@pytest.mark.parametrize("tls", [False, True])
async def test_a_connection_that_is_turned_away_is_told_so(tls: bool) -> None:
    """Over TLS it is closed: an answer would need a handshake."""
    server = server_of(2)
    server.config.ssl = tls or None  # type: ignore[assignment]
    server._open_ready = lambda: None  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0)) as listener, connected(listener, 3) as clients:
        for client in clients:
            client.send(POST)
            accepted, _ = listener.accept()
            assert accepted.recv(1, socket.MSG_PEEK)
            server._begin(accepted)
        if tls:
            with pytest.raises(ConnectionResetError):
                clients[2].recv(1)
        else:
            told = clients[2].recv(4096)
            assert told.startswith(b"HTTP/1.1 429 ") and b"retry-after: " in told
            assert clients[2].recv(1) == b"", "it ends without a reset"
        assert len(server._ready) == 2
        while server._ready:
            server._ready.pop().close()


async def test_a_connection_whose_bytes_wait_to_be_read_makes_no_room() -> None:
    server = server_of(3)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener,
        connected(listener, 3) as clients,
    ):
        async with running(server, listener):
            await until(lambda: len(server._silent) == 3, "all are accepted")
            oldest, silent, ended = clients
            # All in one turn: the loop has not seen the bytes.
            oldest.send(GET)
            ended.shutdown(socket.SHUT_WR)
            server._max_silent = 1
            server._make_room()
            assert len(server._silent) == 1
            assert await answer(oldest) == b"HTTP/1.1 200"
            assert await answer(silent) == b"", "it made room instead"
            assert await answer(ended) == b""


async def test_silent_connections_of_one_address_close_none_of_another() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener:
        async with running(server_of(8), listener):
            with connected(listener, 1) as (client,), connected(listener, 40, "127.0.0.2") as flood:
                for one in flood[:33]:
                    assert await answer(one) == b""
                client.send(GET)
                assert await answer(client) == b"HTTP/1.1 200"


async def test_clients_are_accepted_beside_a_flood_of_another_address() -> None:
    """In one queue they waited for all of it."""
    server = server_of(SILENT)
    order: list[str] = []
    add = server._add

    def note(connection: socket.socket, client: tuple[str, int]) -> None:
        order.append(client[0])
        add(connection, client)

    server._add = note  # type: ignore[method-assign]
    listeners = listen_http(RouterConfig(model=Path("m"), http_port=0))
    with contextlib.ExitStack() as stack:
        for one in listeners:
            stack.enter_context(one)
        stack.enter_context(connected(listeners[0], 200, "127.0.0.1"))
        for last in range(2, 18):
            stack.enter_context(connected(listeners[0], 1, f"127.0.0.{last}"))
        async with running(server, *listeners):
            await until(lambda: len(order) == 216, "all are accepted")
    # Some may be of its share.
    assert len(set(order[:64])) > 8


@pytest.mark.parametrize(("tls", "a_turn"), [(True, HANDSHAKES_PER_TURN), (False, OPENED_PER_TURN)])
async def test_few_connections_are_opened_in_one_turn(tls: bool, a_turn: int) -> None:
    """Most of a handshake's work is done in the turn in which it is opened, and a request needs about ten turns."""
    server = server_of(SILENT)
    opened: list[socket.socket] = []

    async def note(connection: socket.socket) -> None:
        opened.append(connection)

    server._open = note  # type: ignore[method-assign]
    server.config.ssl = tls or None  # type: ignore[assignment]
    with contextlib.ExitStack() as stack:
        for _ in range(3 * a_turn):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            theirs.send(b"hello")
            server._ready.push(ours)
        gained = []
        server._allowance.begin_turn()
        asyncio.get_running_loop().call_soon(server._open_ready)
        for _ in range(6):
            before = len(opened)
            await turns(1)
            gained.append(len(opened) - before)
    assert max(gained) == a_turn <= 4 and len(opened) == 3 * a_turn


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


async def test_a_flood_of_handshakes_ends_none_of_another_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "MAX_HANDSHAKES", 2 * HANDSHAKES_PER_TURN)
    make_certs(tmp_path, [], 1)
    own = {"ssl_certfile": tmp_path / "router.pem", "ssl_keyfile": tmp_path / "router.key"}
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trust = ClientTls(tmp_path / "ca.pem").context()
        trust.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    greeting = outgoing.read()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(serving(**own))
        client = stack.enter_context(socket.create_connection(address))
        client.sendall(greeting[:1])
        flood = [
            stack.enter_context(socket.create_connection(address, source_address=("127.0.0.2", 0)))
            for _ in range(24)
        ]
        for one in (client, *flood):
            one.setblocking(False)
        for one in flood:
            one.send(greeting[:1])
        for one in flood[: 1 - 2 * HANDSHAKES_PER_TURN]:
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    assert await loop.sock_recv(one, 1) == b""
        client.send(greeting[1:])
        async with asyncio.timeout(20):
            assert await loop.sock_recv(client, 1) == b"\x16", "the server's greeting"


@pytest.mark.parametrize(
    ("sent", "reset", "opened"),
    [
        (POST, True, False),
        (GET, True, False),
        (b"", False, False),
        (POST, False, False),
        (GET, False, True),
        (b"\r\n" + GET, False, True),
    ],
)
async def test_a_connection_whose_client_has_left_is_not_opened(
    sent: bytes, reset: bool, opened: bool
) -> None:
    """A flood of generations whose clients reset at once kept every other client waiting for 14 s."""
    protocols = 0
    server = server_of(SILENT)
    make = server._protocol

    def protocol() -> asyncio.BufferedProtocol:
        nonlocal protocols
        protocols += 1
        return make()

    server._protocol = protocol  # type: ignore[method-assign]
    with socket.create_server(("127.0.0.1", 0), backlog=SILENT) as listener:
        left = socket.create_connection(listener.getsockname())
        left.sendall(sent)
        if reset:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.close()
        with connected(listener, 1) as (client,):
            client.send(GET)
            async with running(server, listener):
                assert await answer(client) == b"HTTP/1.1 200"
    assert protocols == 1 + opened


async def test_a_connection_that_cannot_be_watched_is_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system limits what each user's processes may watch."""
    failures = [OSError(28, "No space left on device")]
    async with serving() as address:
        add = SilentConnections.add

        def watched(self: SilentConnections, *given: Any) -> None:
            if failures:
                raise failures.pop()
            add(self, *given)

        monkeypatch.setattr(SilentConnections, "add", watched)
        with socket.create_connection(address) as first, socket.create_connection(address) as second:
            first.setblocking(False)
            second.setblocking(False)
            assert await answer(first) == b""
            second.send(GET)
            assert await answer(second) == b"HTTP/1.1 200"
