"""What counts as life, on both sides of a link (rule 8)."""

from __future__ import annotations

import asyncio

from cluster.protocol.times import LOST_SECONDS
from router.link import links as all_links
from router.link.connection import Connection
from tests.harness.waiting import until
from tests.router.link.conftest import PROMPT, end, tokens
from wire import link_pb2
from worker.link import connection as worker_connection


async def test_answers_are_no_life(pair):
    one = pair.read()
    pair.worker.hangs = True
    await pair.up()
    before = pair.link._received_at
    for _ in range(3):
        pair.link.ask(-1.0)
        await asyncio.sleep(0.05)
    assert pair.link._connection.received_at > before, "the answers came"
    assert pair.link._received_at == before
    tokens(one.log, 0, 1)
    await until(lambda: pair.link._received_at > before, "a token is life")


async def test_a_beat_is_life(pair):
    pair.read()
    await pair.up()
    before = pair.link._received_at
    await until(lambda: pair.link._received_at > before, "a beat came")


async def test_the_timer_subtracts_its_own_lateness(pair):
    one = pair.read()
    pair.worker.hangs = True
    await pair.up()
    pair.links._timer.cancel()
    now = asyncio.get_running_loop().time()
    pair.link._received_at = now - LOST_SECONDS - 0.3
    pair.links._due = now - 0.6  # as if this tick came 0.6 s late
    pair.links._tick()
    assert one.error is None and 4.0 < pair.link.silent_seconds < LOST_SECONDS
    pair.links._timer.cancel()
    pair.link._received_at -= 1.0
    pair.links._due = asyncio.get_running_loop().time()
    pair.links._tick()
    assert one.error is not None, "by its own silence it is lost"


async def test_the_router_beats(pair, monkeypatch):
    monkeypatch.setattr(worker_connection, "LOST_SECONDS", 0.8)
    one = pair.read()
    await pair.up()
    serial = pair.link._connection.serial
    await asyncio.sleep(2.0)
    assert pair.link._connection.serial == serial, "its beats keep the link"
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")


async def test_an_error_of_one_link_does_not_end_the_beats_of_all(pair, monkeypatch):
    """Every worker would cut the router, again and again."""
    pair.read()
    await pair.up()
    fails = [RuntimeError("a defect")]
    beat = pair.link.beat

    def first_fails() -> None:
        if fails:
            raise fails.pop()
        beat()

    monkeypatch.setattr(pair.link, "beat", first_fails)
    pair.links._beat_at = 0.0
    await until(lambda: not fails, "it has failed")
    pair.links._beat_at = 0.0
    sent: list[None] = []
    monkeypatch.setattr(pair.link._outgoing, "beat", lambda: sent.append(None))
    await until(lambda: sent, "it beats again")


async def test_a_silent_router_is_detached_and_its_attempts_end(pair, monkeypatch):
    one = pair.read()
    await pair.up()
    await until(lambda: pair.worker.routers.detached() == 0, "the worker has its handles attached")
    pair.links._timer.cancel()  # as a router that hangs
    pair.link._connection.connection_lost = lambda error: None
    monkeypatch.setattr(worker_connection, "LOST_SECONDS", 0.6)
    began = asyncio.get_running_loop().time()
    await until(lambda: pair.worker.routers.detached() == 1, "its handles are detached")
    assert asyncio.get_running_loop().time() - began >= 0.5
    await until(lambda: pair.worker.cancelled == [one.transfer_id], "the attempt is cancelled")


async def test_a_worker_that_was_stopped_keeps_its_routers(pair):
    one = pair.read()
    await pair.up()
    (connection,) = pair.worker._listener._open
    connection._timer.cancel()
    connection._due -= 10
    connection._received_at -= 10
    connection._tick()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "what the router sent lay unread")
    assert not pair.worker.cancelled


async def test_silent_handles_are_asked_for_in_one_list(pair, monkeypatch):
    many = [pair.read() for _ in range(20)]
    await pair.up()
    asked: list[list[int]] = []
    write = Connection.write

    def noted(connection: Connection, frame: link_pb2.RouterFrame) -> None:
        asked.append(list(frame.status))
        write(connection, frame)

    monkeypatch.setattr(Connection, "write", noted)
    tokens(many[0].log, 0, 1)
    await until(lambda: many[0].tokens == [[0]], "it came")
    for one in many[1:]:
        one.handle.received_at -= LOST_SECONDS + 1
    pair.link.ask(LOST_SECONDS)
    await until(lambda: any(asked), "they are asked for")
    assert [one for one in asked if one] == [[one.handle.number for one in many[1:]]]
    pair.link.ask(LOST_SECONDS)
    await asyncio.sleep(0.1)
    assert len([one for one in asked if one]) == 1, "again after as long a silence only"
    assert not any(one.error for one in many)


async def test_a_lost_credit_is_sent_again_once_its_handle_is_silent(pair):
    """Behind a full window no token came, and so no other credit: the request never ended."""
    one, unanswered = pair.read(), pair.read(opened=False, taken_in=False)
    await pair.up()
    tokens(one.log, 0, 300)
    await until(lambda: len(one.tokens[0]) == 256, "its window is full")
    one.limit = PROMPT + 512  # granted, and lost
    pair.link.ask(60.0)
    await asyncio.sleep(0.1)
    assert len(one.tokens[0]) == 256
    pair.link.ask(-1.0)
    await until(lambda: len(one.tokens[0]) == 300, "the rest came")
    assert one.tokens == [list(range(300))] and unanswered.error is None


async def test_queued_and_paused_handles_are_no_suspects(pair, monkeypatch):
    monkeypatch.setattr(all_links, "STATUS_SECONDS", 0.2)
    queued, paused = pair.read(), pair.read()
    await pair.up()
    tokens(paused.log, 0, 256)
    await until(lambda: len(paused.tokens[0]) == 256, "its window is full")
    await asyncio.sleep(1.5)
    assert queued.error is None and paused.error is None and not pair.links.suspects
    paused.limit = PROMPT + 512
    paused.handle.credit(0, paused.limit)
    tokens(paused.log, 256, 10)
    end(paused.log)
    await until(lambda: paused.end is not None, "it goes on")
    assert paused.tokens == [list(range(266))]


async def test_a_router_that_is_always_late_loses_a_silent_worker(pair):
    """Each tick 0.2 s late, as where other processes want the processor: a third of the time counts."""
    one = pair.read()
    pair.worker.hangs = True
    await pair.up()
    ticks = 0
    while one.error is None and ticks < 100:
        ticks += 1
        pair.links._timer.cancel()
        pair.link._received_at -= 0.3
        pair.links._due = asyncio.get_running_loop().time() - 0.2
        pair.links._tick()
    assert LOST_SECONDS / 0.3 < ticks <= (LOST_SECONDS + 0.3) / 0.1


async def test_lateness_is_subtracted_from_a_blocked_write_too(pair):
    one = pair.read()
    await pair.up()
    connection, now = pair.link._connection, asyncio.get_running_loop().time()
    connection.allow_delay(0.6)
    assert not connection.blocked
    connection.blocked_since = now - LOST_SECONDS - 0.3
    pair.links._timer.cancel()
    pair.links._due = now - 0.6
    pair.links._tick()
    assert one.error is None and 4.0 < pair.link.silent_seconds < LOST_SECONDS
    pair.link.restart_clocks()
    assert pair.link.silent_seconds < 1.0
    connection.resume_writing()


async def test_a_router_that_was_stopped_asks_for_no_handle_at_once(pair):
    """Their entries lie unread: each would be asked for, and its credit sent again."""
    one = pair.read()
    await pair.up()
    one.handle.received_at -= 10.0
    pair.link.restart_clocks()
    assert asyncio.get_running_loop().time() - one.handle.received_at < 1.0


async def test_silent_handles_are_looked_for_now_and_then(pair, monkeypatch):
    """Not at each tick: that would look at every handle of every link ten times a second."""
    pair.read()
    await pair.up()
    looked: list[float] = []
    monkeypatch.setattr(pair.link, "ask", looked.append)
    await asyncio.sleep(0.5)
    assert len(looked) <= 1


async def test_a_handle_whose_tokens_come_is_not_asked_for(pair, monkeypatch):
    one = pair.read()
    await pair.up()
    asked: list[int] = []
    monkeypatch.setattr(pair.link._outgoing, "status", asked.append)
    one.handle.received_at -= LOST_SECONDS + 1
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it came")
    pair.link.ask(LOST_SECONDS)
    assert not asked
    one.handle.received_at -= LOST_SECONDS + 1
    pair.link.ask(LOST_SECONDS)
    assert asked == [one.handle.number]
