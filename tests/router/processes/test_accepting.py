"""Which process accepts a connection from the socket that they share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from uvicorn import Config

from cluster.config.router import RouterConfig
from cluster.protocol.times import SUSPECT_SECONDS
from router.processes.http import SharedHttpServer, counted
from router.processes.member import SLACK_CONNECTIONS, Member, process_config
from router.processes.memory import Figure, SharedMemory
from tests.harness.waiting import until

SILENT = 6


@pytest.fixture
def memory() -> SharedMemory:
    made = SharedMemory.create(2, 4)
    for slot in made.slots():
        slot.beat()
    return made


def member(memory: SharedMemory, index: int) -> Member:
    none: Any = None  # neither its socket nor its parent is needed here
    return Member("router", index, memory, none, none)


@pytest.mark.parametrize("figure", [Figure.HTTP_CONNECTIONS, Figure.OPENING])
def test_the_process_with_more_connections_lets_the_other_accept_first(
    memory: SharedMemory, figure: Figure
) -> None:
    first = member(memory, 0)
    memory.slot(0).set(figure, SLACK_CONNECTIONS + 1)
    assert first.has_more_connections()
    memory.slot(1).set(Figure.OPENING, 1)
    assert not first.has_more_connections(), "silent connections of others count as its own do"


async def test_connections_that_send_nothing_are_published_and_forgotten(memory: SharedMemory) -> None:
    opening = memory.slot(0)
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        server = SharedHttpServer(Config(app=lambda: None), member(memory, 0), 0.2, 100)
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=5))
        accepting = asyncio.create_task(server._accept([listener]))
        try:
            await until(lambda: opening.get(Figure.OPENING) == SILENT, "they are published")
        finally:
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        closing = asyncio.create_task(server._close_silent())
        try:
            await until(lambda: opening.get(Figure.OPENING) == 0, "they are forgotten")
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)


@pytest.mark.parametrize("state", ["leaves", "is silent", "is not there yet"])
def test_a_process_that_will_not_accept_is_not_let_first(memory: SharedMemory, state: str) -> None:
    """Each connection would wait for it."""
    first, other = member(memory, 0), memory.slot(1)
    memory.slot(0).set(Figure.HTTP_CONNECTIONS, SLACK_CONNECTIONS + 1)
    assert first.has_more_connections()
    if state == "leaves":
        other.set(Figure.DRAINING, 1)
    elif state == "is silent":
        other.set(Figure.BEAT, time.monotonic_ns() - int((SUSPECT_SECONDS + 1) * 1e9))
    else:
        other.set(Figure.BEAT, 0)
    assert not first.has_more_connections()


def test_connections_are_counted_from_their_begin_to_their_end(memory: SharedMemory) -> None:
    """For the limit of all processes together."""
    seen: list[int] = []

    class Protocol:
        connections: ClassVar[set[Any]] = set()

        def connection_made(self, transport: Any) -> None:
            seen.append(memory.slot(0).get(Figure.HTTP_CONNECTIONS))
            self.connections.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            self.connections.discard(self)

        def _connection_limit(self) -> int:
            return 5

    plain: Any = Protocol
    made, nothing = counted(plain, member(memory, 0)), cast(asyncio.Transport, None)
    kind: Any = made
    first, second = kind(), kind()
    first.connection_made(nothing)
    second.connection_made(nothing)
    assert seen == [1, 2], "before the others' are read"
    assert memory.slot(0).get(Figure.HTTP_CONNECTIONS) == 2
    first.connection_lost(None)
    assert memory.slot(0).get(Figure.HTTP_CONNECTIONS) == 1
    for elsewhere, left in ((0, 5), (3, 2), (7, 0)):
        memory.slot(1).set(Figure.HTTP_CONNECTIONS, elsewhere)
        assert first._connection_limit() == left


def test_limits_that_cannot_be_summed_are_divided() -> None:
    config = RouterConfig(
        model=Path("m"),
        processes=3,
        router_id="name",
        max_grpc_connections=100,
        max_health_watchers=10,
        tokenized_cache_bytes=1 << 20,
        max_concurrent_requests=7,
        metrics_port=5,
    )
    own = process_config(config, 1, 80, 90)
    assert (own.max_grpc_connections, own.max_health_watchers) == (34, 4)
    assert own.tokenized_cache_bytes == (1 << 20) // 3 + 1
    assert own.max_concurrent_requests == 7, "counted over all"
    assert (own.router_id, own.http_port, own.grpc_port, own.metrics_port) == ("name/1", 80, 90, None)
