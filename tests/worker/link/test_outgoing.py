"""What a worker's frames hold: their size, their order, and the share of what is sent again (rule 11)."""

from __future__ import annotations

import pytest

from cluster.link.framing import MAX_FRAME_BYTES, to_frame
from cluster.protocol.link import WINDOW_TOKENS
from tests.worker.link.hand_links import HandLink, HandWorker, done, rows, up
from wire import common_pb2, link_pb2
from worker.attempt_log import AttemptLog
from worker.link.outgoing import MAX_ROWS, Outgoing


@pytest.fixture
async def worker() -> HandWorker:
    return HandWorker()


def whole(choice: int, position: int, alternatives: int = 20) -> common_pb2.Token:
    """A token with as many log probabilities as a request may ask for."""
    token = common_pb2.Token(choice=choice, position=position, token_id=2**31, logprob=-1.5)
    for _ in range(alternatives):
        token.top_logprobs.add(token_id=2**31, logprob=-1.5)
    return token


def fill(log: AttemptLog, count: int, *, extras: bool = False) -> None:
    for position in range(count):
        for one in log.choices:
            log.add(one.choice, position, 2**31, whole(one.choice, position) if extras else None)


@pytest.mark.parametrize("base", [1, 2**64 - 9000])
async def test_frames_stay_within_their_size_whatever_they_hold(worker, base):
    """Many handles of many choices, with and without log probabilities, with answers and cancels between."""
    numbers = list(range(base, base + 1499))
    link = HandLink(worker, 1, version=1)
    for number in numbers[:40]:
        fill(worker.open(number, 128 if number < base + 7 else 2), 30, extras=number % 2 == 0)
    for begin in range(0, len(numbers), 100):
        link.send(
            attach=[
                link_pb2.LinkAttach(
                    transfer_id=number.to_bytes(8, "big").rjust(16, b"\x00"),
                    handle=number,
                    next=[0],
                    limit=[9],
                )
                for number in numbers[begin : begin + 100]
                if number >= base + 40
            ]
        )
    for number in numbers[:40]:
        choices = 128 if number < base + 7 else 2
        link.attach([number], choices=choices, next_handle=base + 999) if number == base + 39 else link.send(
            attach=[_attach(number, choices)]
        )
    for begin in (base + 4999, base + 6999):
        link.send(cancel=list(range(begin, begin + 2000)))
    link.send(status=numbers)
    frames = link.read()
    assert max(link.sizes) <= MAX_FRAME_BYTES
    assert len(rows(frames)) == 30 * (7 * 128 + 33 * 2)
    assert sum(len(frame.cancelled) for frame in frames) == 4000


def _attach(number: int, choices: int) -> link_pb2.LinkAttach:
    return link_pb2.LinkAttach(
        transfer_id=(5).to_bytes(8, "big") + number.to_bytes(8, "big"),
        handle=number,
        next=[0] * choices,
        limit=[WINDOW_TOKENS] * choices,
    )


async def test_columns_come_before_ends_and_ends_of_what_is_complete_only(worker):
    logs = [worker.open(number) for number in (1, 2)]
    link = HandLink(worker, 1, version=1)
    link.attach([1, 2])
    link.read()
    fill(logs[0], 1)
    logs[0].end(done())
    fill(logs[1], 200)
    logs[1].end(done())
    link.session.beat()
    frame = link.read_one()
    assert frame.HasField("beat")
    ended = {end.handle for end in frame.ends}
    sent = rows([frame])
    for number, log in ((1, logs[0]), (2, logs[1])):
        assert (number in ended) == ((number, 0, log.choices[0].end - 1) in sent)


@pytest.mark.parametrize("extras", [False, True])
async def test_what_is_sent_again_takes_half_of_a_frame_and_fresh_tokens_the_rest(worker, extras):
    behind = [worker.open(number) for number in range(1, 41)]
    for log in behind:
        fill(log, 250, extras=extras)
    fresh = [worker.open(number) for number in range(41, 61)]
    link = HandLink(worker, 1, version=1)
    link.attach(list(range(1, 61)))
    frames = []
    for step in range(5):
        for log in fresh:
            log.add(0, step, 7)
        frames.append(link.read_one())
    for step, frame in enumerate(frames):
        came = rows([frame])
        assert {handle for handle, _, position in came if position == step} >= set(range(41, 61)), (
            "every step leaves"
        )
        replayed = [row for row in came if row[0] <= 40]
        # One token of each handle comes with the fresh ones; more of those that are behind fill half a frame.
        assert link.sizes[-5 + step] <= MAX_FRAME_BYTES
        if extras:
            more = len(replayed) - 40
            assert more * whole(0, 0).ByteSize() <= MAX_FRAME_BYTES // 2
    served = {handle for frame in frames[:2] for handle, _, _ in rows([frame])}
    assert served == set(range(1, 61)), "in turn: no handle waits for another one's tokens"


async def test_one_handle_of_many_choices_leaves_room_for_the_others(worker):
    wide, narrow = worker.open(1, 128), worker.open(2)
    fill(wide, 250)
    fill(narrow, 250)
    link = HandLink(worker, 1, version=1)
    link.send(attach=[_attach(1, 128)])
    link.attach([2])
    came = rows([link.read_one()])
    assert sum(handle == 2 for handle, _, _ in came) == 250


async def test_steps_merge_while_a_frame_is_unwritten(worker):
    log = worker.open(1)
    link = HandLink(worker, 1, version=1)
    link.attach([1])
    link.read()
    for position in range(50):
        log.add(0, position, 7)
    frames = link.read()
    assert len(frames) == 1 and len(rows(frames)) == 50


async def test_a_token_larger_than_a_frame_goes_in_pieces_between_others(worker):
    large, small = worker.open(1), worker.open(2)
    link = HandLink(worker, 1, version=1)
    link.attach([1, 2])
    link.read()
    token = whole(0, 0, alternatives=20_000)
    large.add(0, 0, 7, token)
    large.add(0, 1, 7)
    large.end(done())
    frames = []
    for step in range(20):
        small.add(0, step, 7)
        frames.append(link.read_one())
    assert max(link.sizes) <= MAX_FRAME_BYTES
    assert [row for row in rows(frames) if row[0] == 2] == [(2, 0, step) for step in range(20)]
    pieces = [extra for frame in frames for extra in frame.extras if extra.token.position == 0]
    assert len(pieces) > 5 and [piece.more for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    joined = [one for piece in pieces for one in piece.token.top_logprobs]
    assert joined == list(token.top_logprobs)
    for piece in pieces:
        assert (piece.token.token_id, piece.token.logprob) == (token.token_id, token.logprob)
    assert [end.handle for frame in frames for end in frame.ends] == [1], "behind its tokens"


async def test_what_comes_behind_a_frame_is_due_again(worker):
    logs = [worker.open(number) for number in (1, 2)]
    link = HandLink(worker, 1, version=1)
    link.attach([1, 2])
    link.read()
    for step in range(3):
        for log in logs:
            log.add(0, step, 7)
            assert log.is_due
        assert sorted(rows(link.read())) == [(1, 0, step), (2, 0, step)]
        assert not any(log.is_due for log in logs) and link.session._outgoing.empty


async def test_a_step_of_more_handles_than_a_frame_has_rows_leaves_in_turn(worker):
    numbers = list(range(1, MAX_ROWS + 500))
    logs = [worker.open(number) for number in numbers]
    link = HandLink(worker, 1, version=1)
    for begin in range(0, len(numbers), 1000):
        link.send(attach=[_attach(number, 1) for number in numbers[begin : begin + 1000]])
    link.attach([], next_handle=1)
    link.read()
    for log in logs:
        log.add(0, 0, 7)
    first = rows([link.read_one()])
    logs[0].add(0, 1, 7)
    second = rows([link.read_one()])
    assert [handle for handle, _, _ in first + second[:-1]] == numbers and len(first) == MAX_ROWS
    assert second[-1] == (1, 0, 1), "behind those that have waited"


async def test_a_large_token_behind_another_begins_with_its_first_piece(worker):
    log = worker.open(1)
    link = HandLink(worker, 1, version=1)
    link.attach([1])
    link.read()
    tokens = [whole(0, position, alternatives=7000) for position in range(3)]
    for token in tokens:
        log.add(0, token.position, 7, token)
    pieces = [extra for frame in link.read() for extra in frame.extras]
    for token in tokens:
        own = [piece for piece in pieces if piece.token.position == token.position]
        assert len(own) > 1 and own[0].first == 0
        assert [one for piece in own for one in piece.token.top_logprobs] == list(token.top_logprobs)


async def test_one_large_token_of_a_handle_is_under_way_at_a_time(worker):
    """A router joins pieces, and gives all of them up where those of one handle have too many bytes."""
    log = worker.open(1, 8)
    link = HandLink(worker, 1, version=1)
    link.send(attach=[_attach(1, 8)])
    link.attach([], next_handle=1)
    link.read()
    begun: set[int] = set()
    last: list[tuple[int, int]] = []
    for position in range(3):
        for choice in range(8):
            log.add(choice, position, 7, whole(choice, position, alternatives=7000))
        for _ in range(10):  # a step ends while tokens of the one before are still on their way
            for extra in link.read_one().extras:
                begun.discard(extra.token.choice)
                if extra.more:
                    begun.add(extra.token.choice)
                else:
                    last.append((extra.token.choice, extra.token.position))
            assert len(begun) <= 1
    while len(last) < 24:
        last += [(one.token.choice, one.token.position) for one in link.read_one().extras if not one.more]
    assert sorted(last) == [(choice, position) for choice in range(8) for position in range(3)]


async def test_a_large_token_begins_again_on_the_next_link(worker):
    """Its router has given the pieces of before up, and would drop those that follow them: a gap."""
    log = worker.open(1)
    older = up(worker, 1)
    token = whole(0, 0, alternatives=20_000)
    log.add(0, 0, 7, token)
    assert older.read_one().extras[0].more
    newer = HandLink(worker, 2)
    newer.attach([1])
    pieces = [extra for frame in newer.read() for extra in frame.extras]
    assert pieces[0].first == 0 and not pieces[-1].more
    assert [one for piece in pieces for one in piece.token.top_logprobs] == list(token.top_logprobs)


async def test_ends_that_do_not_fit_leave_with_the_next_frame(worker):
    numbers = list(range(1, 101))
    logs = [worker.open(number) for number in numbers]
    link = up(worker, *numbers)
    for log in logs:
        log.end(common_pb2.AttemptEnd(error=common_pb2.ErrorDetail(message="why" * 300)))
    frames = link.read()
    assert len(frames) > 1
    assert sorted(end.handle for frame in frames for end in frame.ends) == numbers


def test_ends_of_cancelled_attempts_stay_within_a_frame():
    """They may have long reasons. Where the frame has no room for one, its cancel is answered without it."""
    outgoing = Outgoing()
    error = common_pb2.ErrorDetail(code="InternalError", message="x" * (MAX_FRAME_BYTES // 8))
    for number in range(20):
        outgoing.cancelled(number, common_pb2.AttemptEnd(error=error))
    answered: dict[int, bool] = {}  # with the end
    while not outgoing.empty:
        frame, _ = outgoing.next_frame()
        assert len(to_frame(frame)) <= MAX_FRAME_BYTES
        answered |= {one.handle: True for one in frame.ends} | dict.fromkeys(frame.cancelled, False)
    assert list(answered) == list(range(20)) and set(answered.values()) == {True, False}
