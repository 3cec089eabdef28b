"""Entries of frames at the router: how many at once, whose they are, and what one bad one ends (rules 1, 10 and 11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.errors import PeerLostError
from cluster.link.framing import to_frame
from cluster.protocol.link import WINDOW_TOKENS
from router.link.connection import ENTRIES_PER_TURN, entries_of
from router.link.identity import RouterIdentity
from router.link.outgoing import attach_frames
from tests.harness.waiting import until
from tests.router.link.conftest import PROMPT, Pair, end, tokens
from wire import common_pb2, link_pb2


async def test_a_turn_of_the_loop_handles_a_bounded_number_of_entries(pair):
    """Many frames at once, small and large: between two turns other connections have theirs (rule 11)."""
    many = [pair.read() for _ in range(100)]
    await pair.up()
    connection, loop = pair.link._connection, asyncio.get_running_loop()
    waiting: list[bytes] = []
    data_received, connection.data_received = connection.data_received, waiting.append
    for step in range(8):
        for one in many[: 100 if step % 2 else 37]:
            tokens(one.log, one.log.choices[0].end - PROMPT, 3 if step == 5 else 1)
        await asyncio.sleep(0.02)
    turns: list[int] = []
    taken = 0

    def next_turn() -> None:
        nonlocal taken
        now = sum(len(one.tokens[0]) for one in many)
        turns.append(now - taken)
        taken = now
        if now < made:
            loop.call_soon(next_turn)

    made = sum(one.log.choices[0].end - PROMPT for one in many)
    connection.data_received = data_received
    loop.call_soon(next_turn)
    connection.data_received(b"".join(waiting))
    await until(lambda: taken == made, "all came")
    assert made > 700 and max(turns) <= ENTRIES_PER_TURN and len(turns) < 20


async def test_a_reader_that_fails_when_it_attaches_ends_alone(pair):
    bad, good = pair.read(), pair.read()
    await pair.up()

    def fails() -> list[int]:
        raise RuntimeError("broken reader")

    bad.positions = fails
    pair.cut()
    await until(lambda: bad.error is not None, "it is lost")
    await until(
        lambda: pair.worker.cancelled == [bad.transfer_id], "and cancelled: the list does not name it"
    )
    tokens(good.log, 0, 2)
    await until(lambda: good.tokens == [[0, 1]], "the other goes on")
    assert good.error is None


async def test_an_older_connections_answers_are_not_the_newer_ones(pair):
    one = pair.read(opened=False, taken_in=False)
    await pair.up()
    older = await moved(pair)
    one.taken_in = True
    pair.open(one)
    pair.link.ask(-1.0)
    late = link_pb2.WorkerFrame()
    late.states.add(handle=one.handle.number, kind=link_pb2.HandleState.UNKNOWN)
    pair.link.take(older, late, entries_of(late))
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")
    assert one.error is None


async def test_unknown_means_nothing_as_the_answer_to_a_question_before_the_run_was_answered(pair):
    """Also if another question was sent since."""
    one = pair.read(opened=False, taken_in=False)
    await pair.up()
    await until(lambda: not one.handle.asked_early, "the answer to its attach has come")
    pair.link.ask(-1.0)
    one.taken_in = True
    pair.open(one)
    pair.link.ask(-1.0)
    unknown = link_pb2.WorkerFrame()
    unknown.states.add(handle=one.handle.number, kind=link_pb2.HandleState.UNKNOWN)
    pair.link.take(pair.link._connection, unknown, entries_of(unknown))
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on")
    assert one.error is None
    pair.link.take(pair.link._connection, unknown, entries_of(unknown))
    assert isinstance(one.error, PeerLostError), "the later question's answer"


def test_numbers_of_handles_and_links_grow_for_a_whole_life():
    one, two = RouterIdentity("r"), RouterIdentity("r")
    assert one.incarnation != two.incarnation, "of one process start each"
    numbers = [one.next_handle() for _ in range(100)]
    assert numbers == sorted(set(numbers)) and one.handle_after == numbers[-1] + 1
    serials = [one.next_serial() for _ in range(3)]
    assert serials == sorted(set(serials))


async def test_entries_of_unknown_kinds_and_handles_are_skipped_and_counted(pair):
    """A later version may send more than this one reads (rules 1 and 10)."""
    one = pair.read()
    await pair.up()
    frame = link_pb2.WorkerFrame(notice=77)  # type: ignore[arg-type]
    frame.states.add(handle=one.handle.number, kind=99)  # type: ignore[arg-type]
    frame.states.add(handle=4711)
    frame.cancelled.append(4711)
    frame.tokens.handle.append(4711)
    frame.tokens.choice.append(0)
    frame.tokens.position.append(0)
    frame.tokens.token_id.append(1)
    frame.ends.add(handle=4712)
    data = link_pb2.WorkerFrame.FromString(frame.SerializeToString() + b"\xfa\x06\x03abc")  # field 111
    assert pair.link.take(pair.link._connection, data, entries_of(data)) is None
    assert pair.links.unread() == 2
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "the link goes on")
    assert one.error is None


async def test_an_attempt_that_is_no_longer_read_is_cancelled_at_its_worker(pair):
    """Given up while the worker did not answer: it would keep blocks for as long as the link is up."""
    one = pair.read()
    await pair.up()
    one.handle.close()
    tokens(one.log, 0, 1)
    await until(lambda: pair.worker.cancelled == [one.transfer_id], "it is cancelled")
    assert pair.links.unread() >= 1


async def test_an_attempt_behind_a_full_window_that_is_given_up_is_cancelled_at_its_worker(pair):
    """No token of it comes that would show that it is still there, and its link may be up for an hour."""
    one = pair.read()
    await pair.up()
    tokens(one.log, 0, WINDOW_TOKENS)
    await until(lambda: len(one.tokens[0]) == WINDOW_TOKENS, "its window is full")
    one.handle.close()  # neither the link nor the call has answered its cancel
    await until(lambda: pair.worker.cancelled == [one.transfer_id], "it is cancelled", 5.0)
    assert not pair.links.unread()


async def test_an_attempt_that_failed_at_an_entry_is_cancelled_at_its_worker(pair):
    """Also where no call reaches it."""
    one = pair.read(fails=True)
    await pair.up()
    tokens(one.log, 0, 1)
    await until(lambda: pair.worker.cancelled == [one.transfer_id], "it is cancelled", 5.0)
    assert one.error is not None


@pytest.mark.parametrize("large", ["top_logprobs", "embedding"])
async def test_a_token_in_pieces_is_joined_and_begins_again_behind_a_break(pair, large):
    one = pair.read()
    await pair.up()
    token = common_pb2.Token(position=PROMPT, token_id=5, logprob=-1.0)
    if large == "embedding":
        token.embedding = bytes(range(251)) * 1600
    for number in range(30_000 if large == "top_logprobs" else 0):
        token.top_logprobs.add(token_id=number, logprob=-float(number))
    came: list[common_pb2.Token] = []
    take = one.token

    def noted(token: common_pb2.Token) -> None:
        came.append(token)
        take(token)

    one.token = noted
    frames, received = 0, pair.link.take

    def cut(connection, frame, entries):
        nonlocal frames
        frames += bool(frame.extras)
        if frames == 3 and frame.extras[0].more:
            pair.cut()
        return received(connection, frame, entries)

    pair.link.take = cut
    one.log.add(0, PROMPT, 5, token)
    tokens(one.log, 1, 3)
    await until(lambda: one.tokens == [[5, 1, 2, 3]], "all came")
    assert came[0] == token and frames > 8


async def test_a_piece_that_continues_no_other_is_dropped(pair):
    one = pair.read()
    await pair.up()
    handle = one.handle
    piece = link_pb2.HandleToken(handle=handle.number, token=common_pb2.Token(position=PROMPT), first=7)
    piece.token.top_logprobs.add(token_id=1)
    assert handle.joined(piece) is None
    begins = link_pb2.HandleToken(handle=handle.number, token=piece.token, more=True)
    assert handle.joined(begins) is None
    assert handle.joined(piece) is None, "six are missing"
    assert handle.joined(begins) is None
    piece.first = 1
    assert len(handle.joined(piece).top_logprobs) == 2


async def test_what_is_kept_of_a_frame_is_a_copy(pair, monkeypatch):
    """A part of a message that is kept would keep the whole frame, with the tokens of others."""
    one = pair.read()
    await pair.up()
    kept: list[Any] = []
    monkeypatch.setattr(one, "token", kept.append)
    monkeypatch.setattr(one, "ended", kept.append)
    number = one.handle.number
    frame = link_pb2.WorkerFrame(
        extras=[link_pb2.HandleToken(handle=number, token=common_pb2.Token(position=PROMPT, token_id=5))],
        ends=[link_pb2.HandleEnd(handle=number, end=common_pb2.AttemptEnd())],
    )
    assert pair.link.take(pair.link._connection, frame, entries_of(frame)) is None
    frame.extras[0].token.token_id = 6
    frame.ends[0].end.outcome = common_pb2.ATTEMPT_OUTCOME_ABORTED
    token, ended = kept
    assert token.token_id == 5 and not ended.outcome


async def test_an_answer_to_no_cancel_is_skipped(pair):
    """Without its handle an attempt would get neither tokens nor an end, and wait for ever."""
    one = pair.read()
    await pair.up()
    frame = link_pb2.WorkerFrame(cancelled=[one.handle.number])
    pair.link.take(pair.link._connection, frame, entries_of(frame))
    tokens(one.log, 0, 1)
    await until(lambda: one.tokens == [[0]], "it goes on", 5.0)
    assert await one.handle.cancel(5.0) and pair.link.idle


async def moved(pair: Pair) -> Any:
    """Move the link; returns the connection before."""
    older = pair.link._connection
    pair.link.move()
    await until(lambda: pair.link._connection is not older, "it moved")
    return older


async def test_a_piece_on_an_older_connection_is_none_of_the_newer_ones(pair):
    """Both have no order: a late one must not end the token that comes again."""
    one = pair.read()
    await pair.up()
    older = await moved(pair)

    def says(connection: Any, first: int, *, more: bool) -> None:
        piece = link_pb2.HandleToken(handle=one.handle.number, first=first, more=more)
        piece.token.position = PROMPT
        piece.token.top_logprobs.add(token_id=first)
        frame = link_pb2.WorkerFrame(extras=[piece])
        pair.link.take(connection, frame, entries_of(frame))

    says(pair.link._connection, 0, more=True)
    says(older, 2, more=True)
    says(pair.link._connection, 1, more=False)
    assert one.tokens == [[0]], "joined"


async def test_what_follows_pieces_on_an_older_connection_does_not_count_without_them(pair):
    """They are sent again on the newer one: their token would be missing before the next one, or before the end."""
    one = pair.read()
    await pair.up()
    older = await moved(pair)
    number, begun = one.handle.number, link_pb2.WorkerFrame()
    for more in (True, False):
        piece = begun.extras.add(handle=number, first=int(not more), more=more)
        piece.token.position = PROMPT
        piece.token.top_logprobs.add(token_id=7)
    begun.extras.add(handle=number, token=common_pb2.Token(position=PROMPT + 1, token_id=1))
    columns = link_pb2.TokenColumns(handle=[number], choice=[0], position=[PROMPT + 2], token_id=[2])
    ended = link_pb2.HandleEnd(handle=number, end=common_pb2.AttemptEnd())
    for frame in (
        begun,
        link_pb2.WorkerFrame(tokens=columns),
        link_pb2.WorkerFrame(tokens=columns, ends=[ended]),
    ):
        pair.link.take(older, frame, entries_of(frame))
    assert one.tokens == [[]] and one.end is None and one.error is None
    tokens(one.log, 0, 3)
    end(one.log)
    await until(lambda: one.end is not None, "the newer one has its end")
    assert one.tokens == [[0, 1, 2]] and not pair.links.unread()


@pytest.mark.parametrize("kind", ["states", "tokens", "extras", "ends"])
async def test_a_large_frame_whose_connection_is_replaced_meanwhile_ends_there(kind, pair):
    many = [pair.read() for _ in range(2 * ENTRIES_PER_TURN)]
    await pair.up()
    older, frame = pair.link._connection, link_pb2.WorkerFrame()
    for number in (one.handle.number for one in many):
        if kind == "tokens":
            for field, value in (("handle", number), ("choice", 0), ("position", PROMPT), ("token_id", 0)):
                getattr(frame.tokens, field).append(value)
        elif kind == "extras":
            frame.extras.add(handle=number, token=common_pb2.Token(position=PROMPT))
        else:  # the state is UNKNOWN
            getattr(frame, kind).add(handle=number)
    pieces = pair.link.take(older, frame, entries_of(frame))
    next(pieces)
    pair.link.move()
    await until(lambda: pair.link._connection is not older, "it moved")
    assert list(pieces) == []
    reached = [bool(one.error or one.end or one.tokens != [[]]) for one in many]
    assert reached == [True] * ENTRIES_PER_TURN + [False] * ENTRIES_PER_TURN


async def test_an_answer_to_a_cancel_counts_on_an_older_connection(pair):
    """The worker answers where it was asked."""
    one = pair.read()
    await pair.up()
    older, freed = pair.link._connection, asyncio.Event()

    async def cancelled(transfer_id: bytes) -> None:
        await freed.wait()

    pair.worker.routers._cancel = cancelled
    cancelling = asyncio.create_task(one.handle.cancel(10.0))
    await until(lambda: pair.worker.handles[one.transfer_id].cancelling, "it was asked")
    pair.link.move()
    await until(lambda: pair.link._connection is not older, "it moved")
    frame = link_pb2.WorkerFrame(cancelled=[one.handle.number])
    pair.link.take(older, frame, entries_of(frame))
    assert await asyncio.wait_for(cancelling, 5.0)
    freed.set()


def test_a_list_of_attempts_with_many_choices_fits_into_frames():
    """A frame that is too large cannot be written: all attempts at the worker were lost."""
    positions = [2**20] * 2000
    attach = link_pb2.LinkAttach(transfer_id=bytes(16), handle=2**40, next=positions, limit=positions)
    frames = list(attach_frames([attach] * 20, 1))
    assert all(map(to_frame, frames))
    assert sum(len(frame.attach) for frame in frames) == 20 and frames[-1].attach_done.next_handle == 1
