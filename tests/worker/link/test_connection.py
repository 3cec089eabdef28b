"""The connection of a link at the worker: one frame at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.faults.points import nothing
from tests.worker.link.counted_session import AnyPort, CountedSession
from worker.link.connection import Connection


@pytest.fixture
async def connection() -> AsyncIterator[Connection]:
    session: Any = CountedSession()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as router:
        router.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.setblocking(False)
        made = Connection(lambda connection: session, AnyPort(), accepted, None, nothing)
        await made._opening
        yield made
        made.abort()


async def test_while_a_frame_is_unwritten_no_other_follows(connection: Connection) -> None:
    """Tokens of later steps join the next one: the logs are the buffer."""
    session: Any = connection._session
    connection.schedule()
    await asyncio.sleep(0)
    assert session.frames == 1
    connection.pause_writing()
    for _ in range(3):
        connection.schedule()
        await asyncio.sleep(0)
    assert session.frames == 1
    connection.resume_writing()
    await asyncio.sleep(0)
    assert session.frames == 2, "it has left"


async def test_what_is_scheduled_before_a_write_blocks_waits_as_well(connection: Connection) -> None:
    session: Any = connection._session
    connection.schedule()
    connection.pause_writing()
    await asyncio.sleep(0)
    assert session.frames == 0
    connection.resume_writing()
    await asyncio.sleep(0)
    assert session.frames == 1
