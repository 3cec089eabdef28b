"""Which process accepts a connection from the socket that they share."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
from uvicorn import Config

from router.processes.http import SharedHttpServer
from router.processes.member import SLACK_CONNECTIONS, Member
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
