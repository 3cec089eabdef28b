"""The two sides of a link over real sockets: what each rule of it promises."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from cluster.errors import InternalError, PeerLostError, StaleTransferError
from cluster.protocol.link import WINDOW_TOKENS
from tests.harness.waiting import until
from tests.router.link.conftest import PROMPT, Pair, end, tokens
from wire import common_pb2


async def test_tokens_and_the_end_come_in_order(pair):
    one, two = pair.read(), pair.read(choices=2)
    await pair.up()
    tokens(one.log, 0, 10)
    tokens(two.log, 0, 5)
    tokens(two.log, 0, 7, choice=1)
    end(one.log)
    await until(lambda: one.end is not None and len(two.tokens[1]) == 7, "all is read")
    assert one.tokens == [list(range(10))]
    assert two.tokens == [list(range(5)), list(range(7))] and two.end is None


async def test_an_attempt_that_is_opened_before_its_link_is_up_waits_for_it(pair):
    one = pair.read()
    tokens(one.log, 0, 3)
    end(one.log)
    await until(lambda: one.end is not None, "it came")
    assert one.tokens == [[0, 1, 2]]


async def test_a_link_that_broke_goes_on_at_the_next_position(pair):
    one = pair.read()
    await pair.up()
    for begin in range(0, 60, 10):
        tokens(one.log, begin, 10)
        pair.cut()
        await pair.up()
    tokens(one.log, 60, 1)
    end(one.log)
    await until(lambda: one.end is not None, "it ended")
    assert one.tokens == [list(range(61))]
    assert not pair.worker.cancelled


async def test_an_end_that_was_lost_with_its_link_is_sent_again(pair):
    one = pair.read()
    await pair.up()
    pair.link._connection._frames.feed = lambda data: []  # received frames are lost
    tokens(one.log, 0, 2)
    end(one.log)
    await asyncio.sleep(0.1)
    assert one.end is None
    pair.cut()
    await until(lambda: one.end is not None, "it was sent again")
    assert one.tokens == [[0, 1]]


async def test_what_a_new_link_does_not_attach_is_cancelled(pair):
    kept, dropped = pair.read(), pair.read()
    await pair.up()
    dropped.handle.close()  # without a cancel: as one that was lost
    pair.cut()
    await until(lambda: pair.worker.cancelled, "the other is cancelled")
    assert pair.worker.cancelled == [dropped.transfer_id]
    tokens(kept.log, 0, 1)
    await until(lambda: kept.tokens == [[0]], "this one goes on")


async def test_without_a_link_attempts_are_cancelled_after_the_detach_time(pair, monkeypatch):
    one = pair.read()
    await pair.up()
    await pair.links.close()
    began = asyncio.get_running_loop().time()
    await until(lambda: pair.worker.cancelled == [one.transfer_id], "it is cancelled")
    assert 1.2 < asyncio.get_running_loop().time() - began < 5
    assert len(pair.worker.routers) == 0


async def test_an_attempt_whose_router_never_comes_is_cancelled(pair):
    reference = common_pb2.HandleRef(incarnation=99, number=1)
    pair.worker.open(bytes(16), reference, common_pb2.GenerateSpec())
    await until(lambda: pair.worker.cancelled == [bytes(16)], "it is cancelled")


async def test_a_cancel_is_answered_when_it_is_done(pair):
    one = pair.read()
    await pair.up()
    assert await one.handle.cancel(5.0)
    assert pair.worker.cancelled == [one.transfer_id]
    assert len(pair.worker.routers) == 0 and pair.link.idle


async def test_a_cancel_that_overtakes_its_run_refuses_it(pair):
    one = pair.read(opened=False, taken_in=False)
    await pair.up()
    assert await one.handle.cancel(5.0)
    with pytest.raises(StaleTransferError, match="cancelled before"):
        pair.open(one)


async def test_a_cancel_without_a_link_says_so(pair):
    one = pair.read()
    await pair.up()
    await pair.worker.stop()
    await until(lambda: pair.links.up() == 0, "it is down")
    assert not await one.handle.cancel(0.3)


async def test_credit_bounds_what_is_sent_and_kept(pair):
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, WINDOW_TOKENS + 40)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS, "the window")
    await asyncio.sleep(0.1)
    assert len(one.tokens[0]) == WINDOW_TOKENS and one.log.full
    pair.worker.credited.clear()  # attaching counts as well
    one.limit = PROMPT + 100 + WINDOW_TOKENS
    one.handle.credit(0, one.limit)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS + 40, "the rest")
    (choice,) = one.log.choices
    assert len(choice.tokens) == WINDOW_TOKENS - 60 and choice.first == PROMPT + 100
    assert pair.worker.credited == [one.transfer_id] and not one.log.full


async def test_credit_that_is_lost_repeated_or_old_changes_nothing(pair):
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, 200)
    (choice,) = one.log.choices
    one.log.credit(0, PROMPT + 150 + WINDOW_TOKENS)
    assert (choice.limit, choice.first) == (PROMPT + 150 + WINDOW_TOKENS, PROMPT + 150)
    for limit in (0, PROMPT, PROMPT + 150 + WINDOW_TOKENS):
        assert not one.log.credit(0, limit)
    assert one.log.credit(0, 2**63), "no more than what there is"
    assert (choice.limit, choice.first, choice.tokens) == (PROMPT + 200 + WINDOW_TOKENS, PROMPT + 200, [])
    assert not one.log.credit(1, 2**20) and not one.log.credit(2**32 - 1, 2**20)


async def test_a_reader_that_fails_ends_alone(pair):
    bad, good = pair.read(fails=True), pair.read()
    await pair.up()
    tokens(bad.log, 0, 1)
    tokens(good.log, 0, 5)
    await until(lambda: good.tokens == [[0, 1, 2, 3, 4]], "the other goes on")
    assert isinstance(bad.error, InternalError) and "broken reader" in str(bad.error)


async def test_status_finds_an_attempt_that_the_worker_lost(pair):
    known = pair.read()
    unknown, expected = (pair.read(opened=False, taken_in=False) for _ in range(2))
    await pair.up()
    unknown.taken_in = True  # its Run is answered meanwhile
    await asyncio.sleep(0.1)
    assert unknown.error is None, "it was asked before that"
    pair.link.ask(-1.0)
    await until(lambda: unknown.error is not None, "it is lost")
    assert known.error is None and expected.error is None
    assert "no such attempt" in str(unknown.error)


async def test_a_link_moves_and_loses_nothing(pair, monkeypatch):
    monkeypatch.setattr("router.link.link.MOVE_PAUSE_SECONDS", 0.0)
    one = pair.read()
    await pair.up()
    for turn in range(5):
        tokens(one.log, 40 * turn, 20)
        older = pair.link._connection
        (connection,) = pair.worker._listener._open
        connection.leave_soon()
        connection._tick()
        await until(lambda older=older: pair.link._connection is not older, "it moved")
        tokens(one.log, 40 * turn + 20, 20)
        await until(lambda: len(pair.worker._listener._open) == 1, "the older one is closed")
    await until(lambda: len(one.tokens[0]) == 200, "all came")
    assert one.tokens == [list(range(200))] and one.error is None
    assert not pair.worker.cancelled


async def test_an_older_link_does_not_take_handles_back(pair):
    one = pair.read()
    await pair.up()
    link, identity = pair.link, pair.links._identity
    serial = identity.next_serial
    identity.next_serial = lambda: 1  # of a link that was delayed
    with contextlib.suppress(OSError, PeerLostError):  # closed before or behind its welcome
        await link._opener.greet(link)
    await asyncio.sleep(0.2)
    assert len(pair.worker._listener._open) == 1
    identity.next_serial = serial
    tokens(one.log, 0, 2)
    await until(lambda: one.tokens == [[0, 1]], "the newest goes on")


async def test_a_slow_router_gets_steps_merged_and_holds_one_frame(pair):
    """What is unwritten stays in the log: the connection holds one frame at most."""
    many = [pair.read() for _ in range(40)]
    await pair.up()
    pair.link._connection._transport.pause_reading()
    (connection,) = pair.worker._listener._open
    for step in range(200):
        for one in many:
            tokens(one.log, step, 1)
        if step % 20 == 0:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert connection._transport.get_write_buffer_size() < 2 * 65536
    pair.link._connection._transport.resume_reading()
    await until(lambda: all(len(one.tokens[0]) == 200 for one in many), "all came")
    assert all(one.tokens == [list(range(200))] for one in many)


async def test_frames_of_many_entries_are_dispatched_in_pieces(pair):
    many = [pair.read() for _ in range(30)]
    await pair.up()
    turns = []
    take = pair.link._handles.take

    def counted(*given):
        pieces = 0
        for piece in take(*given):
            pieces += 1
            yield piece
        turns.append(pieces)

    pair.link._handles.take = counted
    for one in many:
        tokens(one.log, 0, 100)
    await until(lambda: all(len(one.tokens[0]) == 100 for one in many), "all came")
    assert max(turns) >= 1
    assert all(one.tokens == [list(range(100))] for one in many)


async def test_noise_on_the_port_ends_that_connection_alone(pair):
    one = pair.read()
    await pair.up()
    host, _, port = pair.worker.address.rpartition(":")
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        (5).to_bytes(4, "little") + b"\xff\xff\xff\xff\xff",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(noise)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "the link goes on")


async def test_a_connection_without_hello_is_closed(pair, monkeypatch):
    from worker.link import connection

    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.3)
    host, _, port = pair.worker.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_cancelled_numbers_are_bounded(pair, monkeypatch):
    monkeypatch.setattr(pair.worker.routers._cancelled, "_of_one", 3)
    readings = [pair.read(opened=False, taken_in=False) for _ in range(5)]
    await pair.up()
    for one in readings:
        assert await one.handle.cancel(5.0)
    (numbers,) = pair.worker.routers._cancelled._numbers.values()
    assert list(numbers) == [3, 4, 5]


async def test_links_of_workers_that_are_gone_close_once_nothing_is_read(pair):
    one = pair.read()
    await pair.up()
    pair.links.keep_only([])
    assert pair.links.up() == 1, "it still reads"
    end(one.log)
    await until(lambda: one.end is not None, "it ended")
    pair.links.keep_only([])
    await until(lambda: not pair.worker._listener._open, "it is closed")
    assert isinstance(pair, Pair)
