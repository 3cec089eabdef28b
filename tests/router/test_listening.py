"""Listening sockets that are closed without a reset connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import ConfigError
from cluster.sockets import listen
from router.listening import (
    ADDRESS_SHARES,
    QUIET_SECONDS,
    SEND_BUFFER_BYTES,
    accepted_all,
    allow_connections,
    listen_http,
    own_listeners,
    refuse_connections,
    reserve_grpc,
    spread_by_address,
)

CONFIG = RouterConfig(model=Path("m"), http_port=0, grpc_port=0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0, 16) as made:
        yield made


@pytest.fixture
def http_listeners() -> Iterator[list[socket.socket]]:
    listeners = listen_http(CONFIG)
    yield listeners
    for one in listeners:
        one.close()


def test_after_the_refusal_the_queue_does_not_grow(listener: socket.socket) -> None:
    address = listener.getsockname()
    listener.settimeout(10)
    with socket.create_connection(address) as waiting:
        refuse_connections([listener])
        with socket.socket() as late:
            late.settimeout(0.3)
            with pytest.raises(TimeoutError):
                late.connect(address)
            accepted, _ = listener.accept()
            with accepted:
                waiting.sendall(b"on an open connection packets still arrive")
                assert accepted.recv(2) == b"on"
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_a_refusal_can_be_undone(listener: socket.socket) -> None:
    allow_connections([listener])  # without a refusal: nothing happens
    refuse_connections([listener])
    allow_connections([listener])
    with socket.create_connection(listener.getsockname(), timeout=10) as client:
        accepted, address = listener.accept()
        accepted.close()
        assert address == client.getsockname()


async def test_it_is_quiet_once_nothing_has_waited_for_a_while(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with socket.create_connection(listener.getsockname()):
        waiting = asyncio.create_task(accepted_all([listener]))
        await asyncio.sleep(3 * QUIET_SECONDS)
        assert not waiting.done(), "a connection waits"
        began = loop.time()
        listener.accept()[0].close()
        await waiting
        assert loop.time() - began >= QUIET_SECONDS * 0.9


def test_a_process_finds_its_own_listeners(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with socket.create_connection(listener.getsockname()), socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        before = set(os.listdir("/proc/self/fd"))
        (found,) = own_listeners(port)
        assert found.getsockname() == listener.getsockname()
        found.close()
        assert len(os.listdir("/proc/self/fd")) == len(before), "no other descriptor stays"


def test_a_reserved_port_is_taken_for_others_and_free_for_the_routers_own() -> None:
    with reserve_grpc(CONFIG) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            own.bind(("127.0.0.1", port))
            own.listen()
            with pytest.raises(ConfigError, match=f"--grpc-port {port}") as caught:
                reserve_grpc(CONFIG.model_copy(update={"grpc_port": port}))
            assert caught.value.field == "grpc_port"


def test_a_reserved_port_on_which_nothing_listens_yet_is_taken_for_others() -> None:
    with reserve_grpc(CONFIG) as reserved:
        port = reserved.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port {port}"):
            reserve_grpc(CONFIG.model_copy(update={"grpc_port": port}))


@pytest.mark.parametrize("ended", [False, True])
def test_connections_that_a_former_router_has_left_keep_no_port(ended: bool) -> None:
    """Those of a router that did not share its port, still open or waiting for late packets (TIME_WAIT)."""
    with listen("127.0.0.1", 0, 1) as former:
        port = former.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        left, _ = former.accept()
    with client, left:
        if ended:
            left.shutdown(socket.SHUT_RDWR)
            client.close()
        again = CONFIG.model_copy(update={"grpc_port": port})
        with reserve_grpc(again), contextlib.ExitStack() as stack:
            for _ in range(2):
                own = stack.enter_context(socket.socket())
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                own.bind(("127.0.0.1", port))
                own.listen()


def test_a_port_that_is_taken_is_named(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=f"--http-port {port}") as caught:
        listen_http(CONFIG.model_copy(update={"http_port": port}))
    assert caught.value.field == "http_port"
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_router_does_not_share_the_http_port(http_listeners: list[socket.socket]) -> None:
    port = http_listeners[0].getsockname()[1]
    with pytest.raises(ConfigError, match=f"--http-port {port}"):
        listen_http(CONFIG.model_copy(update={"http_port": port}))


@pytest.mark.parametrize("ended", [False, True])
def test_connections_that_a_former_router_has_left_keep_no_http_port(ended: bool) -> None:
    """Those of each share, still open or waiting for late packets (TIME_WAIT)."""
    former, shares = listen_http(CONFIG), set()
    where = former[0].getsockname()
    with contextlib.ExitStack() as stack:
        for last in range(1, 33):
            client = stack.enter_context(
                socket.create_connection(where, 5, source_address=(f"127.0.0.{last}", 0))
            )
            (share,) = select.select(former, [], [], 5)[0]
            left = stack.enter_context(share.accept()[0])
            shares.add(share)
            if ended:
                left.shutdown(socket.SHUT_RDWR)
                client.close()
        assert len(shares) == ADDRESS_SHARES
        for one in former:
            one.close()
        for one in listen_http(CONFIG.model_copy(update={"http_port": where[1]})):
            one.close()


def test_the_http_port_has_a_queue_for_each_share_of_addresses(http_listeners: list[socket.socket]) -> None:
    assert len(http_listeners) == ADDRESS_SHARES
    for one in http_listeners:
        one.setblocking(False)
    where, used = http_listeners[0].getsockname(), set()
    for last in range(1, 33):
        for _ in range(3):
            socket.create_connection(where, 5, source_address=(f"127.0.0.{last}", 0)).close()
        found = accepted(http_listeners)
        assert len(found) == 3 and len(set(found)) == 1
        used |= set(found)
    assert used == set(range(ADDRESS_SHARES))


def test_streams_over_http_are_sent_at_once_and_keep_few_bytes_in_the_kernel(
    http_listeners: list[socket.socket],
) -> None:
    for last in range(1, 9):
        source = f"127.0.0.{last}", 0
        with socket.create_connection(http_listeners[0].getsockname(), 5, source_address=source):
            (share,) = select.select(http_listeners, [], [], 5)[0]
            connection, _ = share.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


def accepted(listeners: list[socket.socket]) -> list[int]:
    """Close the connections that wait. Which listeners had some."""
    had = []
    for index, one in enumerate(listeners):
        with contextlib.suppress(BlockingIOError):
            while True:
                one.accept()[0].close()
                had.append(index)
    return had


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)])
def test_all_connections_from_an_address_reach_the_same_listener(host: str, family: int) -> None:
    """Also with another port of the client, and where one socket listens for IPv4 and IPv6."""
    with contextlib.ExitStack() as stack:
        listeners, port = [], 0
        for _ in range(ADDRESS_SHARES):
            one = stack.enter_context(socket.socket(family))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            one.bind((host, port))
            one.listen()
            one.setblocking(False)
            port = one.getsockname()[1]
            listeners.append(one)
        spread_by_address(listeners, "HTTP")
        where = "127.0.0.1", port
        # Also if they differ in their first bits only, as the routers of several networks may.
        for sources in (
            [f"127.0.0.{last}" for last in range(1, 33)],
            [f"127.{second}.0.1" for second in range(8, 256, 8)],
        ):
            used = set()
            for source in sources:
                for _ in range(4):
                    socket.create_connection(where, 5, source_address=(source, 0)).close()
                found = accepted(listeners)
                assert len(found) == 4 and len(set(found)) == 1
                used |= set(found)
            assert used == set(range(ADDRESS_SHARES)), "addresses are spread"
        if family == socket.AF_INET6:
            for _ in range(4):
                socket.create_connection(("::1", port), 5).close()
            assert len(set(accepted(listeners))) == 1


def test_sockets_that_cannot_spread_connections_are_logged(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    spread_by_address([listener], "HTTP")
    assert "a flood from one address at the HTTP port may delay requests from all others" in caplog.text
