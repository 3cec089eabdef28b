"""The worker's side of links, frame by frame: who owns handles, what is answered, what is kept."""

from __future__ import annotations

import asyncio

import pytest

from cluster.errors import StaleTransferError
from cluster.protocol.link import WINDOW_TOKENS
from tests.harness.waiting import until
from tests.worker.link.hand_links import (
    INCARNATION,
    HandLink,
    HandWorker,
    done,
    kinds,
    notices,
    rows,
    transfer,
    up,
)
from wire import link_pb2


@pytest.fixture
async def worker() -> HandWorker:
    return HandWorker()


def tokens(log, begin: int, count: int, choice: int = 0) -> None:
    for position in range(begin, begin + count):
        log.add(choice, position, 7)


# --- rule 2 ----------------------------------------------------------------------------------------------


async def test_an_older_link_is_told_that_it_moved_and_sends_no_more(worker):
    log = worker.open(1)
    older = up(worker, 1)
    tokens(log, 0, 3)
    newer = HandLink(worker, 2)
    found = older.read()
    assert notices(found) == ["MOVED"] and not rows(found)
    newer.attach([1])
    tokens(log, 3, 3)
    assert not older.read() and rows(newer.read()) == [(1, 0, position) for position in range(6)]


async def test_a_link_that_has_not_attached_yet_is_told_as_well(worker):
    worker.open(1)
    older, newer = HandLink(worker, 1), HandLink(worker, 2)
    assert notices(older.read()) == ["MOVED"]
    older.attach([1])
    newer.attach([1])
    assert kinds(newer.read()) == {1: "OPEN"} and not older.read()
    older.session.beat()
    assert not older.read(), "it has no beats either"


async def test_a_hung_engine_sends_no_beat(worker):
    """A beat is the router's only sign that the engine makes steps."""
    link = up(worker)
    for step, beats in ((4, [4]), (None, []), (5, [5])):
        link.step = step
        link.session.beat()
        assert [frame.beat.engine_step for frame in link.read()] == beats


async def test_an_older_link_cancels_and_closes_and_nothing_else(worker):
    one, two, three = (worker.open(number) for number in (1, 2, 3))
    older = up(worker, 1, 2, 3)
    two.end(done())
    assert len(older.read()[0].ends) == 1
    newer = up(worker, 1, 2, 3, serial=2)
    older.read()
    older.send(credit=[link_pb2.LinkCredit(handle=1, choice=0, limit=400)], status=[1])
    assert one.choices[0].limit == WINDOW_TOKENS and not older.read()
    older.send(cancel=[3], close=[2])
    await until(lambda: 3 in [n for frame in older.read() for n in frame.cancelled], "it is answered")
    assert worker.cancelled == [transfer(3)] and set(worker.handles) == {transfer(1)}
    tokens(one, 0, 1)
    assert (1, 0, 0) in rows(newer.read()) and three is not one


async def test_a_lower_serial_is_refused(worker):
    up(worker, serial=2)
    late = HandLink(worker, 1)
    assert late.closed and late.read()[0].HasField("welcome")


# --- rule 3 ----------------------------------------------------------------------------------------------


async def test_each_attach_is_answered(worker):
    worker.open(1), worker.open(2).end(done())
    link = HandLink(worker, 1)
    link.attach([1, 2, 3])
    found = link.read()
    assert kinds(found) == {1: "OPEN", 2: "ENDED", 3: "UNKNOWN"}
    assert [state.next for frame in found for state in frame.states if state.handle == 1] == [[0]]


async def test_a_handle_of_another_transfer_is_unknown(worker):
    worker.open(1)
    link = HandLink(worker, 1)
    other = link_pb2.LinkAttach(transfer_id=transfer(2), handle=1, next=[0], limit=[256])
    link.send(attach=[other], attach_done=link_pb2.AttachDone(next_handle=9))
    assert kinds(link.read()) == {1: "UNKNOWN"}
    await until(lambda: worker.cancelled == [transfer(1)], "the list does not name it")


async def test_a_list_over_several_frames_is_complete_with_its_last(worker):
    worker.routers._detach_seconds = 1e6  # what the list does not name does not wait for its timer
    for number in (1, 2, 3):
        worker.open(number)
    link = HandLink(worker, 1)
    link.send(attach=[link_pb2.LinkAttach(transfer_id=transfer(1), handle=1, next=[0], limit=[256])])
    await asyncio.sleep(0.05)
    assert not worker.cancelled
    link.attach([3], next_handle=3)
    await until(lambda: worker.cancelled == [transfer(2)], "the other one is named nowhere")
    assert set(worker.handles) == {transfer(1), transfer(3)}


async def test_an_attempt_that_is_dispatched_after_the_list_was_made_goes_on(worker):
    """Its Run may come before the list does: calls have no order with it."""
    link = HandLink(worker, 1)
    log = worker.open(5)
    link.attach([], next_handle=5)
    tokens(log, 0, 2)
    assert rows(link.read()) == [(5, 0, 0), (5, 0, 1)]
    await asyncio.sleep(0.3)  # longer than the detach time
    assert not worker.cancelled


async def test_an_attempt_whose_detach_time_is_over_is_unknown_to_a_link_that_comes_then(worker):
    """Its cancel takes a moment, and forgets it without an end: the router would wait for that until it asks."""
    worker.open(1)
    worker.free.clear()
    link = up(worker, 1)
    link.session.closed()
    await until(lambda: worker.cancelled == [transfer(1)], "it is being cancelled")
    again = HandLink(worker, 2)
    again.attach([1])
    assert kinds(again.read()) == {1: "UNKNOWN"}
    worker.free.set()
    await until(lambda: not worker.handles, "it is forgotten")
    assert worker.cancelled == [transfer(1)]


async def test_an_end_that_left_before_the_list_was_complete_is_kept(worker):
    log = worker.open(1)
    link = HandLink(worker, 1)
    link.send(attach=[link_pb2.LinkAttach(transfer_id=transfer(1), handle=1, next=[0], limit=[256])])
    log.end(done())
    assert len(link.read()[-1].ends) == 1
    link.send(attach_done=link_pb2.AttachDone(next_handle=9))
    link.session.closed()
    again = HandLink(worker, 2)
    again.attach([1])
    found = again.read()
    assert kinds(found) == {1: "ENDED"} and len(found[-1].ends) == 1


# --- rule 4 ----------------------------------------------------------------------------------------------


async def test_fencing_ends_links_in_every_state(worker):
    attached = up(worker)
    greeted = HandLink(worker, 1, incarnation=6)
    worker.routers.fence()
    for link in (attached, greeted):
        assert notices(link.read()) == ["FENCED"] and link.closed


async def test_handles_of_another_incarnation_are_not_taken_over(worker):
    worker.open(1)
    up(worker, 1)
    restarted = HandLink(worker, 1, incarnation=6)
    stolen = link_pb2.LinkAttach(transfer_id=transfer(1), handle=1, next=[0], limit=[256])
    restarted.send(attach=[stolen], attach_done=link_pb2.AttachDone(next_handle=9))
    assert kinds(restarted.read()) == {1: "UNKNOWN"}
    await asyncio.sleep(0.3)
    assert not worker.cancelled, "its own router reads it"


async def test_an_attempt_that_comes_while_the_list_comes_goes_on(worker):
    """A list may take several frames; calls have no order with them."""
    link = HandLink(worker, 1)
    named = link_pb2.LinkAttach(transfer_id=transfer(1), handle=1, next=[0], limit=[WINDOW_TOKENS])
    link.send(attach=[named])
    assert kinds(link.read()) == {1: "UNKNOWN"}
    log = worker.open(1)
    worker.open(2)
    link.send(attach_done=link_pb2.AttachDone(next_handle=3))
    tokens(log, 0, 2)
    assert rows(link.read()) == [(1, 0, 0), (1, 0, 1)]
    await until(lambda: worker.cancelled == [transfer(2)], "the list does not name it")
    await asyncio.sleep(0.3)
    assert worker.cancelled == [transfer(2)], "its timer is off"


# --- rule 7 ----------------------------------------------------------------------------------------------


async def test_an_ended_handle_stays_until_close(worker):
    log = worker.open(1)
    tokens(log, 0, 5)
    log.end(done())
    link = up(worker, 1)
    await asyncio.sleep(0.5)  # longer than the detach time
    assert set(worker.handles) == {transfer(1)}
    link.session.closed()
    again = HandLink(worker, 2)
    again.attach([1], at=2)
    found = again.read()
    assert kinds(found) == {1: "ENDED"} and len(found[-1].ends) == 1
    assert rows(found) == [(1, 0, position) for position in (2, 3, 4)]
    again.send(close=[1])
    assert not worker.handles


async def test_without_a_link_an_ended_handle_goes_after_the_detach_time(worker):
    worker.open(1).end(done())
    link = up(worker, 1)
    link.session.closed()
    assert worker.handles
    await until(lambda: not worker.handles, "it is forgotten")
    assert not worker.cancelled


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("version", "choices", "window"),
    [(1, 1, 256), (1, 4, 256), (2, 1, 256), (2, 4, 64), (2, 16, 16), (2, 128, 16)],
)
async def test_at_most_a_window_is_kept_and_sent_of_all_choices_extras_included(
    worker, version, choices, window, early
):
    """Of each one to a router of link version 1. `early`: the attempt comes before its router's list, or not in it."""
    from wire import common_pb2

    log = worker.open(1, choices) if early else None
    link = HandLink(worker, 1, version=version)
    link.attach([1] if early else [], choices=choices, next_handle=1)
    log = log or worker.open(1, choices)
    acknowledged = window // 4
    for position in range(window):
        for choice in range(choices):
            assert not log.full or position == window - 1
            token = common_pb2.Token(choice=choice, position=position, token_id=7, logprob=-1.0)
            log.add(choice, position, 7, token)
    assert log.full, "the request pauses"
    assert len(rows(link.read())) == choices * window
    credits = [
        link_pb2.LinkCredit(handle=1, choice=choice, limit=acknowledged + window) for choice in range(choices)
    ]
    link.send(credit=credits)
    for one in log.choices:
        assert len(one.tokens) == len(one.extras) == window - acknowledged
        assert min(one.extras) == one.first == acknowledged
    assert not log.full and worker.credited


async def test_a_handle_without_a_link_is_cancelled_after_the_detach_time(worker):
    worker.open(1)
    link = up(worker, 1)
    await asyncio.sleep(0.3)  # longer than the detach time
    assert not worker.cancelled
    link.session.closed()
    assert not worker.cancelled
    await until(lambda: worker.cancelled == [transfer(1)], "it is cancelled")
    assert not worker.handles


# --- rules 9 and 10 ----------------------------------------------------------------------------------------


async def test_a_cancel_is_answered_once_blocks_and_staging_are_free(worker):
    worker.open(1)
    link = up(worker, 1)
    worker.free.clear()
    link.send(cancel=[1])
    await until(lambda: worker.cancelled == [transfer(1)], "it is cancelled")
    assert not link.read()
    worker.free.set()
    await until(lambda: [list(frame.cancelled) for frame in link.read()] == [[1]], "it is answered")


async def test_a_cancel_that_overtakes_its_attempt_refuses_it(worker):
    link = up(worker)
    link.send(cancel=[5])
    assert [list(frame.cancelled) for frame in link.read()] == [[5]]
    with pytest.raises(StaleTransferError, match="cancelled before"):
        worker.open(5)
    worker.open(5, incarnation=INCARNATION + 1)


@pytest.mark.parametrize("entry", ["attach", "credit"])
async def test_an_entry_that_fails_ends_its_attempt_alone(worker, monkeypatch, entry):
    bad, good = worker.open(1), worker.open(2)
    link = HandLink(worker, 1) if entry == "attach" else up(worker, 1, 2)

    def fails(*arguments: object) -> bool:
        raise RuntimeError("broken log")

    monkeypatch.setattr(bad, "resume", fails)
    monkeypatch.setattr(bad, "credit", fails)
    if entry == "attach":
        link.attach([1, 2])
    else:
        limits = [link_pb2.LinkCredit(handle=number, choice=0, limit=300) for number in (1, 2)]
        link.send(credit=limits)
    tokens(good, 0, 2)
    assert [row for row in rows(link.read()) if row[0] == 2] == [(2, 0, 0), (2, 0, 1)]
    await until(lambda: worker.cancelled == [transfer(1)], "the attempt has ended")
    assert not link.closed and set(worker.handles) == {transfer(2)}
