"""How long a worker keeps a connection whose router does not do its part (rules 8 and 12), and does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cluster.protocol.link import ATTACH_SECONDS, MOVE_SECONDS
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.worker.link.raw_link import RawLink
from worker.link import connection as connections
from worker.link.outgoing import MAX_ANSWERS
from worker.link.session import State

Opens = Callable[..., Awaitable[RawLink]]


@pytest.fixture
async def worker() -> AsyncIterator[LinkedWorker]:
    made = LinkedWorker("d", 7)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def opens(worker: LinkedWorker) -> AsyncIterator[Opens]:
    links: list[RawLink] = []

    async def open_one(serial: int = 1) -> RawLink:
        links.append(await RawLink.open(worker, serial))
        await until(lambda: links[-1].came, "it is welcomed")
        return links[-1]

    yield open_one
    for one in links:
        one.close()


def accepted(worker: LinkedWorker, state: State) -> Any:
    """The worker's end of the one connection in this state."""
    (found,) = (one for one in worker._listener._open if one._session.state is state)
    return found


async def test_a_router_whose_list_is_not_complete_in_time_is_cut(worker, opens, monkeypatch):
    """Its beats do not help it: what it does not name waits for its list."""
    monkeypatch.setattr(connections, "ATTACH_SECONDS", 0.6)
    link = await opens()
    await link.beat(5.0)
    assert link.ended and ATTACH_SECONDS == 10.0
    attached = await opens(2)
    attached.attach()
    await attached.beat(1.5)
    assert not attached.ended


@pytest.mark.parametrize("state", [State.HELLO, State.ATTACHING])
async def test_time_in_which_the_worker_was_stopped_does_not_count(worker, opens, state):
    if state is State.HELLO:
        host, _, port = worker.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: [one for one in worker._listener._open if one._transport], "it is accepted")
    else:
        writer = (await opens()).writer
    connection = accepted(worker, state)
    connection._timer.cancel()
    for late, stays in ((20.0, True), (0.0, False)):
        for clock in ("_made", "_received_at"):
            setattr(connection, clock, getattr(connection, clock) - 20.0)
        connection._due = asyncio.get_running_loop().time() - late
        connection._tick()
        assert connection._transport.is_closing() is not stays
    writer.close()


async def test_a_router_is_asked_once_for_another_link(worker, opens):
    link = await opens()
    link.attach()
    await until(lambda: worker._listener._open.links, "it is up")
    accepted(worker, State.UP).leave_soon()
    await link.beat(2.2)
    assert link.notices == ["GO_AWAY"] and not link.ended


async def test_a_link_that_has_moved_is_cut_though_its_router_keeps_it(worker, opens, monkeypatch):
    assert MOVE_SECONDS == 60.0
    monkeypatch.setattr(connections, "MOVE_SECONDS", 0.8)
    older = await opens(1)
    older.attach()
    newer = await opens(2)
    newer.attach()
    await asyncio.gather(older.beat(5.0), newer.beat(2.0))
    assert older.notices == ["MOVED"] and older.ended and not newer.ended


async def test_answers_that_were_not_read_go_on_once_they_are(worker, opens):
    """The worker reads nothing more of such a router, until its answers have left."""
    link = await opens()
    link.attach()
    await until(lambda: worker._listener._open.links, "it is up")
    link._reader._transport.pause_reading()  # type: ignore[attr-defined]
    count = 50 * MAX_ANSWERS
    for first in range(0, count, 2048):
        link.send(status=range(first, first + 2048))
    connection = accepted(worker, State.UP)
    await until(lambda: connection._session._outgoing.full and not connection._reading, "it waits")
    assert connection._paused
    link._reader._transport.resume_reading()  # type: ignore[attr-defined]
    await until(lambda: sum(len(frame.states) for frame in link.came) == count, "all came", 30.0)
    assert not link.ended
