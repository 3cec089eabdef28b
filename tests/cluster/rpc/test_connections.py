"""Connections that a gRPC server does not end by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from cluster.process import socket_diag
from cluster.rpc import connections
from cluster.rpc.connections import FloodWatch, StallWatch, stop
from tests.harness.waiting import wait_for
from tests.security.attacks.grpc_frames import has_ended

LOOKS = 3
PIECE = 1000


@dataclass
class Pair:
    client: socket.socket
    server: socket.socket  # one end of a connection to `port`
    port: int

    def has_ended(self) -> bool:
        return has_ended(self.client)


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((request.param, 0), family=family))
        client = stack.enter_context(socket.create_connection(listener.getsockname()[:2], timeout=10))
        server = stack.enter_context(listener.accept()[0])
        yield Pair(client, server, listener.getsockname()[1])


def looks(watch: FloodWatch, pair: Pair, number: int, read: int, answer: bytes = b"") -> int:
    """Of each look before which the client has sent, and the server has read and answered so much: how many connections
    were ended in all of them."""
    ended = 0
    for _ in range(number):
        pair.client.sendall(bytes(PIECE))
        left = read
        while left:
            left -= len(pair.server.recv(left))
        pair.server.sendall(answer)
        ended += watch.look()
    return ended


@pytest.fixture
def watch(pair: Pair) -> FloodWatch:
    return FloodWatch(pair.port, LOOKS * connections.POLL_SECONDS)


def test_a_connection_that_is_sent_to_without_a_pause_ends(watch: FloodWatch, pair: Pair) -> None:
    assert looks(watch, pair, LOOKS, PIECE // 2) == 0
    assert not pair.has_ended()
    assert looks(watch, pair, 1, PIECE // 2) == 1
    assert pair.has_ended()
    assert watch.look() == 0


def test_a_connection_that_is_answered_stays(watch: FloodWatch, pair: Pair) -> None:
    assert looks(watch, pair, 3 * LOOKS, PIECE // 2, b"a window update") == 0


def test_a_connection_of_which_all_is_read_meanwhile_stays(watch: FloodWatch, pair: Pair) -> None:
    for _ in range(3):
        assert looks(watch, pair, LOOKS, PIECE // 2) == 0
        assert looks(watch, pair, 1, PIECE + LOOKS * PIECE // 2) == 0
    assert not pair.has_ended()


def test_a_connection_that_is_not_read_stays(watch: FloodWatch, pair: Pair) -> None:
    """gRPC's threads are at work elsewhere; or its peer reads nothing, which the kernel ends."""
    assert looks(watch, pair, 3 * LOOKS, 0) == 0
    assert not pair.has_ended()


def test_a_connection_that_is_read_after_a_long_wait_stays(watch: FloodWatch, pair: Pair) -> None:
    """For one of gRPC's threads: a look may find it half read, before gRPC could write anything."""
    for _ in range(2):
        assert looks(watch, pair, 2 * LOOKS, 0) == 0
        assert looks(watch, pair, 1, PIECE // 2) == 0
    assert not pair.has_ended()


def test_a_flood_that_had_to_wait_ends_soon_after_it_is_read(watch: FloodWatch, pair: Pair) -> None:
    assert looks(watch, pair, 2 * LOOKS, 0) == 0
    assert looks(watch, pair, connections.READS, PIECE // 2) == 1
    assert pair.has_ended()


def fill(pair: Pair) -> None:
    """The server writes more than the kernel takes."""
    pair.server.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            pair.server.send(bytes(1 << 16))


def test_a_connection_on_which_nothing_is_read_ends(pair: Pair) -> None:
    """gRPC ends none: each call on it, a refused one too, stayed in memory for an hour."""
    watch = StallWatch(pair.port, LOOKS * connections.POLL_SECONDS)
    fill(pair)
    seen = [0]

    def look() -> int:
        seen[0] += 1
        return watch.look()

    assert wait_for(look, 10, "it is ended") == 1
    assert seen[0] > LOOKS
    wait_for(pair.has_ended, 10, "its client sees that")


def test_a_connection_that_is_read_now_and_then_stays(pair: Pair) -> None:
    watch = StallWatch(pair.port, LOOKS * connections.POLL_SECONDS)
    fill(pair)
    for _ in range(3):
        assert [watch.look() for _ in range(LOOKS)] == [0] * LOOKS
        before = acknowledged(pair)
        pair.client.recv(1 << 18, socket.MSG_WAITALL)
        wait_for(lambda before=before: acknowledged(pair) != before, 10, "it is acknowledged")


def acknowledged(pair: Pair) -> list[int]:
    return [one.acknowledged for one in socket_diag.unacknowledged_connections(pair.port)]


def test_connections_of_other_ports_are_left_alone(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert looks(FloodWatch(other.getsockname()[1], 1), pair, 3 * LOOKS, PIECE // 2) == 0
        assert connections.end(other.getsockname()[1]) == 0
    assert not pair.has_ended()


def test_a_system_that_does_not_show_connections_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(connections, "unread_connections", refuse)
    watch = FloodWatch(1, 1)
    watch.start()
    watch.close()
    assert "keep their connections: not permitted" in caplog.text


def test_an_error_in_place_of_connections_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel without tcp_diag gives it: the end of a list without entries."""
    monkeypatch.setattr(socket, "IPPROTO_TCP", 200)
    with pytest.raises(OSError, match="sock_diag: No such file or directory"):
        socket_diag.unread_connections(1)


def test_a_kernel_that_does_not_count_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(socket_diag, "_SENT", 1 << 10)
    pair.client.sendall(bytes(PIECE))
    assert select.select([pair.server], [], [], 10)[0]
    with pytest.raises(OSError, match="too short"):
        socket_diag.unread_connections(pair.port)


def test_looks_that_fail_go_on_with_one_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, failed = FloodWatch(1, 1), []

    def look(_: int) -> list[socket_diag.Unread]:
        failed.append(1)
        if len(failed) == 3:
            watch.close()
        raise TimeoutError("timed out")

    monkeypatch.setattr(connections, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(connections, "unread_connections", look)
    watch._run()
    assert len(failed) == 3
    assert caplog.text.count("retrying: timed out") == 1


def test_a_descriptor_that_is_no_socket_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may close a socket, and open a file under its number, between two looks at it."""
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(stat, "S_ISSOCK", lambda _: True)
    assert connections.end(1) == 0
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_stop_ends_the_connections_that_grpc_does_not_end(
    monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setattr(connections, "STOP_SECONDS", 0.0)
    pair.server.setblocking(False)

    class Flooded:
        async def stop(self, grace: float | None) -> None:
            """Like gRPC's, returns once the server's connections have ended."""
            assert await asyncio.get_running_loop().sock_recv(pair.server, 1) == b""

    async with asyncio.timeout(10):
        await stop([Flooded()], pair.port, 0.0)
    assert pair.has_ended()


class Busy:
    """A server that does not stop."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def stop(self, grace: float | None) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


async def test_a_stop_has_an_end(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    monkeypatch.setattr(connections, "STOP_SECONDS", 0.0)
    monkeypatch.setattr(connections, "END_SECONDS", 0.0)
    server = Busy()
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    async with asyncio.timeout(10):
        await stop([server], pair.port, 0.0)
        await server.cancelled.wait()
    await asyncio.sleep(0)
    assert not errors


async def test_an_error_of_a_server_is_raised_once_the_others_have_stopped(pair: Pair) -> None:
    stopped = []

    class Failing:
        async def stop(self, grace: float | None) -> None:
            raise RuntimeError("no such server")

    class Slower:
        async def stop(self, grace: float | None) -> None:
            await asyncio.sleep(0)
            stopped.append(self)

    with pytest.raises(RuntimeError, match="no such server"):
        await stop([Failing(), Slower()], pair.port, 10.0)
    assert stopped
    assert not pair.has_ended()


async def test_a_cancelled_stop_ends_no_connection(pair: Pair) -> None:
    server = Busy()
    stopping = asyncio.create_task(stop([server], pair.port, 100.0))
    await server.begun.wait()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await server.cancelled.wait()
    assert not pair.has_ended()
