"""What becomes of single handles at a worker where links and attempts come, go and are forgotten in any order."""

from __future__ import annotations

import asyncio

import pytest

from cluster.protocol.link import WINDOW_TOKENS
from tests.harness.waiting import until
from tests.worker.link.hand_links import HandLink, HandWorker, done, kinds, rows, transfer, up
from wire import common_pb2, link_pb2


@pytest.fixture
async def worker() -> HandWorker:
    return HandWorker()


async def test_a_list_that_was_not_complete_names_nothing_for_the_next_link(worker):
    """An attempt that comes afterwards is not the next list's: its router has given it up (rule 3)."""
    worker.routers._detach_seconds = 1e6
    first = HandLink(worker, 1)
    first.send(attach=[link_pb2.LinkAttach(transfer_id=transfer(6), handle=6, next=[0], limit=[256])])
    assert kinds(first.read()) == {6: "UNKNOWN"}
    second = HandLink(worker, 2)
    worker.open(6)
    second.attach([], next_handle=10)
    await until(lambda: worker.cancelled == [transfer(6)], "the complete list does not name it")


@pytest.mark.parametrize("early", [True, False])
async def test_what_a_list_grants_resumes_a_paused_request(worker, early):
    """`early`: the attempt comes before its entry in the list, else behind it (rule 7)."""
    log = worker.open(1) if early else None
    link = HandLink(worker, 1)
    limit = [2 * WINDOW_TOKENS]
    named = link_pb2.LinkAttach(transfer_id=transfer(1), handle=1, next=[0], limit=limit)
    if log is not None:
        for position in range(WINDOW_TOKENS):
            log.add(0, position, 7)
        assert log.full
    link.send(attach=[named])
    log = log or worker.open(1)
    link.send(attach_done=link_pb2.AttachDone(next_handle=9))
    assert worker.credited == [transfer(1)] and not log.full


async def test_an_older_links_end_changes_nothing(worker):
    log = worker.open(1)
    older = up(worker, 1)
    newer = up(worker, 1, serial=2)
    older.session.closed()
    log.add(0, 0, 7)
    assert rows(newer.read()) == [(1, 0, 0)] and worker.routers.detached() == 0
    await asyncio.sleep(0.3)
    assert not worker.cancelled


async def test_the_detach_time_begins_once_however_many_links_break(worker):
    """A link that comes and goes without a list keeps nothing (rule 3)."""
    worker.open(1).end(done())
    worker.open(2)
    up(worker, 1, 2).session.closed()
    timers = [handle.timer for handle in worker.handles.values()]
    assert None not in timers
    for serial in (2, 3):
        HandLink(worker, serial).session.closed()
    assert [handle.timer for handle in worker.handles.values()] == timers


async def test_nothing_is_sent_of_what_is_forgotten(worker):
    log = worker.open(1)
    link = up(worker, 1)
    for position in range(3):
        log.add(0, position, 7)
    worker.forget(transfer(1))
    assert not link.read()


async def test_an_attempt_is_cancelled_once_however_often_its_router_asks(worker):
    worker.open(1)
    older = up(worker, 1)
    worker.free.clear()
    older.send(cancel=[1, 1])
    newer = up(worker, serial=2)  # whose list does not name it
    newer.send(cancel=[1], close=[1])
    await asyncio.sleep(0.05)
    assert worker.cancelled == [transfer(1)]
    worker.free.set()
    await until(lambda: not worker.handles, "it is forgotten")
    assert worker.cancelled == [transfer(1)]


async def test_cancelled_numbers_go_with_their_router(worker):
    link = up(worker)
    link.send(cancel=[5, 6])
    assert len(worker.routers._cancelled) == 2
    link.session.closed()
    assert not worker.routers._cancelled and not worker.routers._routers


@pytest.mark.parametrize("wrong", [{"epoch": 8}, {"incarnation": 0}, {"version": 0}])
async def test_a_hello_that_is_not_for_this_worker_takes_no_handle(worker, wrong):
    """Of an earlier epoch, of no router process, or without a common version (rules 4 and 13)."""
    log = worker.open(1)
    link = up(worker, 1)
    stranger = HandLink(worker, 2, **wrong)
    assert stranger.closed and not link.closed
    (frame,) = stranger.read()
    assert frame.welcome.version == (0 if "version" in wrong else 2)
    log.add(0, 0, 7)
    assert rows(link.read()) == [(1, 0, 0)] and worker.routers.detached() == 0


async def test_a_serial_that_has_come_before_owns_nothing(worker):
    """Serials grow: the one that came first has the handles (rule 2)."""
    log = worker.open(1)
    first, second = up(worker, 1), HandLink(worker, 1)
    assert second.closed and not first.closed
    log.add(0, 0, 7)
    assert rows(first.read()) == [(1, 0, 0)]


async def test_what_a_frame_has_no_room_for_is_due_at_once(worker):
    """Not with the next token, or with a beat."""
    log = worker.open(1)
    link, scheduled = up(worker, 1), 0

    def schedule() -> None:
        nonlocal scheduled
        scheduled += 1

    link.schedule = schedule
    token = common_pb2.Token(token_id=7)
    for number in range(9000):
        token.top_logprobs.add(token_id=2**31 + number, logprob=-1.0)
    log.add(0, 0, 7, token)
    flushed = 0
    while scheduled:
        scheduled = 0
        link.session.flush()
        flushed += 1
    assert flushed >= 3 and rows(link.read())[-1] == (1, 0, 0) and log.choices[0].sent == 1


async def test_a_cancel_is_answered_by_the_end_with_its_report(worker):
    """Its router learns how much of the prompt was cached."""
    log = worker.open(1)
    link = up(worker, 1)
    link.read()
    worker.free.clear()
    log.add(0, 0, 7)
    link.send(cancel=[1])
    end = done()
    end.report.cached_tokens = 32
    log.end(end)
    worker.free.set()
    await until(lambda: not worker.handles, "it is forgotten")
    answers = link.read()
    assert [(one.handle, one.end) for frame in answers for one in frame.ends] == [(1, end)]
    assert not [number for frame in answers for number in frame.cancelled]


async def test_an_end_that_was_sent_is_not_sent_again_as_the_answer_to_a_cancel(worker):
    log = worker.open(1)
    link = up(worker, 1)
    log.end(done())
    assert [one.handle for frame in link.read() for one in frame.ends] == [1]
    link.send(cancel=[1])
    await until(lambda: not worker.handles, "it is forgotten")
    answers = link.read()
    assert [number for frame in answers for number in frame.cancelled] == [1]
    assert not [one for frame in answers for one in frame.ends]


@pytest.mark.parametrize("moves_first", [False, True])
async def test_an_older_link_answers_a_cancel_without_the_end(worker, moves_first):
    """Its router reads no ends there."""
    log = worker.open(1)
    older = up(worker, 1)
    if moves_first:
        up(worker, 1, serial=2)
    log.end(done())
    older.send(cancel=[1])
    await until(lambda: not worker.handles, "it is forgotten")
    if not moves_first:
        up(worker, serial=2)
    answers = older.read()
    assert [number for frame in answers for number in frame.cancelled] == [1]
    assert not [one for frame in answers for one in frame.ends]


async def test_an_end_that_an_earlier_link_sent_is_the_answer_on_the_next_one(worker):
    """It may have been lost with that link."""
    log = worker.open(1)
    earlier = up(worker, 1)
    log.end(done())
    earlier.read()
    earlier.session.closed()
    link = HandLink(worker, 2)
    link.attach([1])
    link.send(cancel=[1])  # before a frame leaves
    await until(lambda: not worker.handles, "it is forgotten")
    answers = link.read()
    assert [one.handle for frame in answers for one in frame.ends] == [1]
