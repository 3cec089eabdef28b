"""Connections that wait to be accepted at the HTTP port."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest

from router.frontends.http.connection.accept_queues import AcceptQueues


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)) for _ in range(2)]


@pytest.fixture
def queues(listeners: list[socket.socket]) -> Iterator[AcceptQueues]:
    with contextlib.closing(AcceptQueues(listeners)) as made:
        yield made


@pytest.fixture
def clients() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def connect(clients: contextlib.ExitStack, listener: socket.socket) -> None:
    clients.enter_context(socket.create_connection(listener.getsockname(), timeout=5))


def accepted(queues: AcceptQueues, clients: contextlib.ExitStack) -> list[int]:
    """The ports of those that wait, in the order in which they are accepted."""
    ports = []
    with contextlib.suppress(BlockingIOError):
        while True:
            connection, client = queues.accept()
            clients.enter_context(connection)
            assert not connection.getblocking() and client == connection.getpeername()
            ports.append(connection.getsockname()[1])
    return ports


def test_each_queue_has_a_turn(
    listeners: list[socket.socket], queues: AcceptQueues, clients: contextlib.ExitStack
) -> None:
    flooded, other = (one.getsockname()[1] for one in listeners)
    for _ in range(8):
        connect(clients, listeners[0])
    for _ in range(2):
        connect(clients, listeners[1])
    ports = accepted(queues, clients)
    assert sorted(ports) == sorted([flooded] * 8 + [other] * 2)
    assert other in ports[:2] and other in ports[2:4]


def test_a_flood_that_began_before_does_not_keep_another_queue_waiting(
    listeners: list[socket.socket], queues: AcceptQueues, clients: contextlib.ExitStack
) -> None:
    for _ in range(8):
        connect(clients, listeners[0])
    clients.enter_context(queues.accept()[0])
    connect(clients, listeners[1])
    assert listeners[1].getsockname()[1] in accepted(queues, clients)[:2]


def test_it_is_readable_while_connections_wait(
    listeners: list[socket.socket], queues: AcceptQueues, clients: contextlib.ExitStack
) -> None:
    assert select.select([queues], [], [], 0)[0] == []
    connect(clients, listeners[1])
    assert select.select([queues], [], [], 5)[0] == [queues]
    assert len(accepted(queues, clients)) == 1
    assert select.select([queues], [], [], 0)[0] == []


def test_another_process_may_be_first(
    listeners: list[socket.socket], queues: AcceptQueues, clients: contextlib.ExitStack
) -> None:
    """A queue that was seen to wait has been emptied when its turn comes; the next one has its turn."""
    for listener in listeners:
        for _ in range(2):
            connect(clients, listener)
    clients.enter_context(queues.accept()[0])
    for listener in listeners:
        with contextlib.suppress(BlockingIOError):
            while True:
                clients.enter_context(listener.accept()[0])
    with pytest.raises(BlockingIOError):
        queues.accept()
    connect(clients, listeners[0])
    assert len(accepted(queues, clients)) == 1
