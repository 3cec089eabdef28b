"""What a router does when a link breaks, and what it does not take for a break (rule 5)."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.addresses import split
from cluster.errors import InternalError, PeerLostError
from cluster.protocol.link import LINK_LOST_SECONDS, RETRY_SECONDS
from router.link import links as all_links
from router.link import opener
from router.link.connection import Connection
from router.link.state import LinkState
from tests.harness.waiting import until
from tests.router.link.conftest import end, tokens
from wire import link_pb2

REDISPATCH_SECONDS = 1.2


class Paused:
    """The module asyncio with another `sleep`."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]):
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


@pytest.mark.parametrize("seconds", [0.2, 0.5])
async def test_a_reset_of_half_a_second_costs_no_new_attempt(pair, network, seconds):
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, 50)
    network.cut([], [], "reset")
    tokens(one.log, 50, 50)
    await asyncio.sleep(seconds)
    network.heal()
    tokens(one.log, 100, 50)
    end(one.log)
    await until(lambda: one.end is not None or one.error is not None, "it ended")
    assert one.error is None and one.tokens == [list(range(150))]
    assert not pair.worker.cancelled and not pair.links.suspects


async def test_a_reset_that_lasts_loses_the_worker_in_time(pair, network):
    one = pair.read()
    await pair.up()
    network.cut([], [], "reset")
    began = time.monotonic()
    await until(lambda: one.error is not None, "it is lost")
    assert 0.5 < time.monotonic() - began < REDISPATCH_SECONDS
    assert isinstance(one.error, PeerLostError) and "no link to d" in str(one.error)
    assert pair.links.suspects == {pair.info.name}, "nothing new is placed there"
    network.heal()
    await pair.up()
    assert not pair.links.suspects


async def test_a_connection_that_stands_when_the_time_is_over_is_waited_for(pair, network, monkeypatch):
    """A worker under load answers a hello late: with half a second of reset before, no time would be left for it."""
    monkeypatch.setattr(opener, "WELCOME_SECONDS", 30.0)
    one = pair.read()
    await pair.up()
    network.cut([], [], "both")
    pair.cut()
    await asyncio.sleep(LINK_LOST_SECONDS + 0.2)
    assert one.error is None
    network.heal()
    tokens(one.log, 0, 5)
    end(one.log)
    await until(lambda: one.end is not None or one.error is not None, "it ended")
    assert one.error is None and one.tokens == [list(range(5))]


async def test_a_connection_that_stands_is_not_waited_for_without_end(pair, network):
    one = pair.read()
    await pair.up()
    network.cut([], [], "both")
    pair.cut()
    began = time.monotonic()
    await until(lambda: one.error is not None, "it is lost")
    assert time.monotonic() - began >= LINK_LOST_SECONDS
    assert isinstance(one.error, PeerLostError) and "no link to d" in str(one.error)
    network.heal()
    await pair.up()


async def test_what_the_router_is_late_does_not_count(pair, monkeypatch):
    sleep = asyncio.sleep

    async def late(seconds: float) -> None:
        await sleep(seconds + opener.MAX_LATE_SECONDS)

    one = pair.read()
    await pair.up()
    monkeypatch.setattr(opener, "asyncio", Paused(late))
    assert await pair.link._opener._sleep(0.01) == opener.MAX_LATE_SECONDS, "no more than that"
    assert one.error is None


async def test_each_try_is_a_fresh_connection_after_its_pause(pair, network, monkeypatch):
    one = pair.read()
    await pair.up()
    pauses, sleep = [], asyncio.sleep

    async def slept(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(seconds)

    monkeypatch.setattr(opener, "asyncio", Paused(slept))
    opened = []
    accept = network.open

    def counted(opener: Any, target: str, reply: bytes = b"") -> None:
        opened.append(opener)
        accept(opener, target, reply)

    monkeypatch.setattr(network, "open", counted)
    network.cut([], [], "reset")
    await until(lambda: one.error is not None, "it is lost")
    assert pauses[:4] == list(RETRY_SECONDS[:4]) and sum(pauses) < LINK_LOST_SECONDS
    assert 5 <= len(opened) <= 8
    assert pauses[-1] == opener.MIN_PAUSE_SECONDS, "the last tries come close together"


@pytest.mark.parametrize("way", ["both", "from", "to"])
async def test_silence_is_a_pause_and_loses_nothing(pair, network, monkeypatch, way):
    monkeypatch.setattr(all_links, "SUSPECT_SECONDS", 0.7)
    one = pair.read()
    await pair.up()
    network.cut([], [], way)
    tokens(one.log, 0, 100)
    await asyncio.sleep(1.2)
    assert pair.links.silent() == (way != "to"), "suspect, not lost"
    network.heal()
    tokens(one.log, 100, 100)
    end(one.log)
    await until(lambda: one.end is not None or one.error is not None, "it ended")
    assert one.error is None and one.tokens == [list(range(200))]
    assert not pair.worker.cancelled


async def test_a_connection_that_does_not_come_about_is_left_for_a_fresh_one(pair, monkeypatch):
    """A full backlog drops the SYN; the kernel sends another one after a second only."""
    one = pair.read()
    await pair.up()
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for idle in waiting:
        idle.setblocking(False)
        idle.connect_ex(full.getsockname())
    addresses = [f"127.0.0.1:{full.getsockname()[1]}"]
    monkeypatch.setattr(opener, "split", lambda address: split((addresses or [address]).pop()))
    began = time.monotonic()
    pair.cut()
    await until(lambda: not addresses and pair.links.up() == 1, "it is up again")
    assert opener.TCP_SECONDS <= time.monotonic() - began < LINK_LOST_SECONDS
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")
    for each in (full, *waiting):
        each.close()


async def test_a_link_that_breaks_at_once_is_tried_with_longer_pauses(pair, network):
    """It must not turn the loop as fast as it can."""
    one = pair.read()
    await pair.up()
    broken = []

    def attached(whose: object) -> None:
        broken.append(whose)
        pair.link._loop.call_soon(lambda: pair.link._connection and pair.link._connection.abort())

    pair.link._identity.at_attach = attached
    pair.cut()
    await asyncio.sleep(1.0)
    assert 4 <= len(broken) <= 8 and one.error is None
    pair.link._identity.at_attach = lambda whose: None
    await pair.up()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")


async def test_another_router_takes_nothing_over(pair):
    """A router that has restarted: its handles of before run out by their timer (rule 4)."""
    one = pair.read()
    await pair.up()
    router = all_links.Links("r")
    two = type(one)(one.transfer_id)
    handle = router.open(pair.info, two)
    await until(lambda: two.error is not None, "it has no such attempt")
    assert handle.number == one.handle.number and "no such attempt" in str(two.error)
    await router.close()
    tokens(one.log, 0, 2)
    await until(lambda: one.tokens == [[0, 1]], "the first one's goes on")
    assert not pair.worker.cancelled


async def test_an_unexpected_exception_of_a_link_loses_its_handles_and_it_opens_again(pair, monkeypatch):
    one = pair.read()
    await pair.up()
    opening = pair.link._opener.open

    async def fails(*_: object) -> None:
        monkeypatch.setattr(pair.link._opener, "open", opening)
        raise RuntimeError("broken")

    monkeypatch.setattr(pair.link._opener, "open", fails)
    pair.cut()
    await until(lambda: isinstance(one.error, InternalError), "its attempt is lost")
    await pair.up()
    other = pair.read()
    tokens(other.log, 0, 1)
    await until(lambda: other.tokens == [[0]], "the link serves")


async def test_a_break_ends_the_move_under_way(pair, monkeypatch):
    """Its hello would have a higher serial than that of the connection after the break: the worker would send nothing
    there any more, and cancel the attempts."""
    one = pair.read()
    await pair.up()
    opening, older = pair.link._opener, pair.link._connection
    reach, may_reach = opening._reach, asyncio.Event()

    async def slow(seconds: float) -> Any:
        await may_reach.wait()
        return await reach(seconds)

    monkeypatch.setattr(opening, "_reach", slow)
    pair.link.move()
    await asyncio.sleep(0.05)
    monkeypatch.setattr(opening, "_reach", reach)
    pair.cut()
    await until(lambda: pair.link._connection not in (None, older), "it is up again")
    may_reach.set()
    await asyncio.sleep(0.3)
    tokens(one.log, 0, 3)
    await until(lambda: one.tokens == [[0, 1, 2]], "it goes on", 2.0)
    assert one.error is None and not pair.worker.cancelled and pair.links.up() == 1
    notice = link_pb2.WorkerFrame(notice=link_pb2.LINK_NOTICE_MOVED)
    pair.link.take(pair.link._connection, notice, 0)  # with no move under way that it could hurry
    pair.link.move()
    await until(lambda: pair.link.state is LinkState.UP, "a later move takes place")
    tokens(one.log, 3, 1)
    await until(lambda: one.tokens == [[0, 1, 2, 3]], "and loses nothing", 2.0)


async def test_a_request_that_comes_as_its_worker_is_lost_waits_for_no_pause(pair, monkeypatch):
    monkeypatch.setattr("router.link.link.LOST_PAUSE_SECONDS", 60.0)
    pair.read()
    await pair.up()
    pair.link.give_up(PeerLostError("silent"))
    one = pair.read()  # before the link's task has run
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "its link is opened at once", 10.0)


async def test_a_request_for_a_lost_worker_ends_its_pause(pair, monkeypatch):
    monkeypatch.setattr("router.link.link.LOST_PAUSE_SECONDS", 60.0)
    pair.read()
    await pair.up()
    pair.link.give_up(PeerLostError("silent"))
    await asyncio.sleep(0.1)
    assert pair.links.up() == 0
    one = pair.read()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "its link is opened at once", 10.0)


async def test_only_a_link_that_broke_has_little_time(pair, monkeypatch):
    """A lost worker may be one that starts again: its first connection has as long as any first one (rule 5)."""
    pair.read()
    await pair.up()
    opened, opening = [], pair.link._opener.open

    async def noted(link: Any, was_up: bool, attempt: int) -> Any:
        opened.append(was_up)
        return await opening(link, was_up, attempt)

    monkeypatch.setattr(pair.link._opener, "open", noted)
    pair.cut()
    await until(lambda: len(opened) == 1 and pair.links.up() == 1, "it is up again")
    pair.link.give_up(PeerLostError("silent"))
    await until(lambda: len(opened) == 2 and pair.links.up() == 1, "it is up once more")
    assert opened == [True, False]


async def test_a_cancel_does_not_wait_for_a_worker_that_is_lost(pair, monkeypatch):
    one = pair.read()
    await pair.up()

    async def never(transfer_id: bytes) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(pair.worker.routers, "_cancel", never)
    asking = asyncio.create_task(one.handle.cancel(60.0))
    await asyncio.sleep(0.1)
    assert not asking.done()
    pair.link.give_up(PeerLostError("silent"))
    assert await asyncio.wait_for(asking, 5.0) is False


@pytest.mark.parametrize("how", ["it breaks", "it is fenced"])
async def test_a_link_that_ends_at_its_worker_while_it_is_closed_is_closed(how, pair):
    pair.read()
    await pair.up()
    link, connection = pair.link, pair.link._connection
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    assert link._connection is connection, "its tasks have not ended"
    if how == "it breaks":
        link.gone(connection, None)
    else:
        link.take(connection, link_pb2.WorkerFrame(notice=link_pb2.LINK_NOTICE_FENCED), 0)
    await closing
    assert link.state is LinkState.CLOSED and link._connection is None
    pair.links._links.clear()


async def test_what_waits_for_a_worker_that_reads_again_is_sent_at_once(pair):
    """Not only with the next beat."""
    one = pair.read()
    await pair.up()
    pair.links._timer.cancel()
    connection = pair.link._connection
    connection.pause_writing()
    cancelling = asyncio.create_task(one.handle.cancel(30.0))
    await asyncio.sleep(0.2)
    assert not pair.worker.cancelled, "nothing is written meanwhile"
    connection.resume_writing()
    assert await asyncio.wait_for(cancelling, 5.0)


async def test_what_was_not_sent_before_a_break_is_not_sent_behind_it(pair, monkeypatch):
    """The list says it all: an older question's answer would be taken for a later one's, and an attempt that is being
    cancelled is not named."""
    kept, dropped = pair.read(), pair.read()
    await pair.up()
    frames: list[link_pb2.RouterFrame] = []
    write = Connection.write

    def noted(connection: Connection, frame: link_pb2.RouterFrame) -> None:
        frames.append(frame)
        write(connection, frame)

    monkeypatch.setattr(Connection, "write", noted)
    pair.links._timer.cancel()
    pair.link._connection.pause_writing()
    pair.link.ask(-1.0)
    kept.handle.credit(0, 500)
    cancelling = asyncio.create_task(dropped.handle.cancel(30.0))
    await asyncio.sleep(0.1)
    assert not frames
    pair.cut()
    await until(lambda: pair.worker.cancelled == [dropped.transfer_id], "its new list does not name it", 10.0)
    pair.link.beat()
    await until(lambda: any(frame.beat for frame in frames), "and with it what waits")
    named = [attach.handle for frame in frames for attach in frame.attach]
    assert named == [kept.handle.number]
    assert not any(frame.status or frame.credit or frame.cancel for frame in frames)
    cancelling.cancel()
