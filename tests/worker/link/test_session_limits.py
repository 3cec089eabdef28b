"""What one link costs its worker: entries of a turn, answers that wait, and who owns the handles."""

from __future__ import annotations

import pytest

from cluster.errors import InvalidRequestError
from cluster.link.framing import FrameReader, to_frame
from router.link.outgoing import attach_frames
from tests.harness.linked_router import Facts
from wire import common_pb2, link_pb2
from worker.link import outgoing, routers, session
from worker.link.handle import Handle
from worker.link.routers import Routers
from worker.link.session import Session, State
from worker.link.turns import ENTRIES_PER_TURN

TURN = ENTRIES_PER_TURN
Frame = link_pb2.RouterFrame


class Wire:
    """Frames that the worker has written."""

    def __init__(self) -> None:
        self.frames: list[link_pb2.WorkerFrame] = []
        self._reader = FrameReader()

    def write(self, frame: bytes) -> None:
        self.frames += map(link_pb2.WorkerFrame.FromString, self._reader.feed(frame))

    def close(self) -> None:
        """Nothing is open."""

    def schedule(self) -> None:
        """The test flushes."""


def hello(serial: int = 1, router_id: str = "r") -> Frame:
    facts = Facts()
    return Frame(
        hello=link_pb2.LinkHello(
            min_version=1,
            max_version=1,
            router_id=router_id,
            incarnation=7,
            serial=serial,
            worker_id=facts.worker_id,
            epoch=facts.epoch,
        )
    )


class World:
    def __init__(self) -> None:
        self.cancelled: list[bytes] = []
        self.routers = Routers(
            cancel=self._cancel, forget=lambda transfer_id: None, credited=lambda transfer_id: None
        )

    async def _cancel(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)

    def session(self) -> Session:
        return Session(self.routers, Facts(), Wire(), lambda: 1)

    def open(self, number: int) -> Handle:
        spec = common_pb2.GenerateSpec(prompt_tokens=bytes(4))
        handle = Handle((7, number), number.to_bytes(16, "big"), spec)
        self.routers.open(handle)
        return handle


def say(link: Session, *frames: Frame) -> bool:
    """One turn. Whether more is left."""
    link.received(b"".join(map(to_frame, frames)))
    return link.read()


def up(world: World) -> Session:
    link = world.session()
    assert not say(link, hello(), Frame(attach_done=link_pb2.AttachDone(next_handle=1)))
    assert link.state is State.UP
    return link


def turns(link: Session) -> int:
    """To dispatch the rest."""
    count = 1
    while link.read():
        count += 1
    return count


@pytest.mark.parametrize(
    "flood",
    [
        [Frame()] * (4 * TURN),
        [Frame(beat=True)] * (4 * TURN),
        [Frame(credit=[link_pb2.LinkCredit(limit=2**64 - 1)] * (4 * TURN))],
        [Frame(close=range(4 * TURN))],
        [Frame(status=[1] * (4 * TURN))],
        [Frame(cancel=[1] * (4 * TURN))],
    ],
    ids=["empty", "beats", "credit", "closes", "questions", "cancels"],
)
async def test_a_flood_takes_a_number_of_entries_a_turn(flood):
    link = up(World())
    assert say(link, *flood), "more is left"
    assert link.unread, "nothing more is taken in meanwhile"
    assert 3 <= turns(link) <= 5
    assert not link.unread and link.state is State.UP


async def test_a_list_of_handles_takes_a_number_of_entries_a_turn():
    link = World().session()
    many = Frame(attach=[link_pb2.LinkAttach(handle=1)] * (4 * TURN))
    assert say(link, hello(), many)
    assert 3 <= turns(link) <= 5
    assert link.state is State.ATTACHING


@pytest.mark.parametrize(
    "frame",
    [
        Frame(attach=[link_pb2.LinkAttach()] * 32_700),
        Frame(credit=[link_pb2.LinkCredit()] * 32_700),
        Frame(credit=[link_pb2.LinkCredit()] * 2000, cancel=[1] * 49),
        Frame(status=[1] * 2049),
    ],
    ids=["attaches", "credit", "both", "questions"],
)
async def test_a_frame_has_no_more_entries_than_a_router_sends(frame):
    """32,700 empty ones take 64 KB as bytes and 2 MB parsed, and stay while they wait for their turns."""
    link = World().session()
    say(link, hello())
    with pytest.raises(InvalidRequestError, match="entries"):
        say(link, frame)


async def test_a_list_of_the_shortest_real_entries_is_taken():
    attach = link_pb2.LinkAttach(transfer_id=bytes(16), handle=1, next=[1], limit=[1])
    (first, *_) = attach_frames([attach] * 4000, 1)
    link = World().session()
    say(link, hello(), first)
    assert turns(link) >= len(first.attach) // TURN
    assert link.state is State.ATTACHING


async def test_bytes_are_cut_into_frames_as_they_are_dispatched():
    """Half a million of frames without content in one read of the socket would take the loop for a tenth of a second."""
    link = up(World())
    data = to_frame(Frame()) * (8 * TURN)
    half = len(data) // 2 + 1
    for part in (data[:half], data[half:]):
        link.received(part)
        assert len(link._unread) <= session.PIECE_BYTES // 4
    assert link.read(10) and link.taken == 10
    taken = link.taken
    while link.read(100):
        taken += link.taken
    assert taken + link.taken == 8 * TURN and not link.unread


@pytest.mark.parametrize("asked", ["cancel", "status"])
async def test_answers_that_are_not_read_stop_the_reading(asked, monkeypatch):
    """A router that asks for what does not exist, and reads nothing, is not listened to any more."""
    monkeypatch.setattr(routers, "MAX_EARLY", 100)
    world = World()
    link = up(world)
    for first in range(0, 50_000, 2000):
        numbers = range(first, first + 2000)
        link.received(to_frame(Frame(cancel=numbers) if asked == "cancel" else Frame(status=numbers)))
    for _ in range(200):
        link.read()
    waiting = link._outgoing
    assert len(waiting._states) + len(waiting._cancelled) == outgoing.MAX_ANSWERS
    assert not link.read() and link.unread
    assert len(world.routers._cancelled) <= 100
    wire = link._transport
    while link.unread or not waiting.empty:
        link.flush()
        link.read()
    frames = wire.frames  # type: ignore[attr-defined]
    answers = [state.handle for frame in frames for state in frame.states]
    answers += [number for frame in frames for number in frame.cancelled]
    assert sorted(answers) == list(range(50_000)), "once it reads, it gets all of them"


async def test_an_older_link_that_attached_by_half_is_moved_too():
    """It may not come up beside the newer one, and what it had attached counts for nothing."""
    world = World()
    handle = world.open(1)
    older, newer = world.session(), world.session()
    say(
        older,
        hello(1),
        Frame(attach=[link_pb2.LinkAttach(handle=1, transfer_id=handle.transfer_id, next=[1], limit=[1])]),
    )
    say(newer, hello(2))
    assert older.state is State.MOVED
    say(older, Frame(attach_done=link_pb2.AttachDone(next_handle=2)))
    assert older.state is State.MOVED
    say(newer, Frame(attach_done=link_pb2.AttachDone(next_handle=2)))
    assert newer.state is State.UP
    await world.routers.close(1)
    assert world.cancelled == [handle.transfer_id], "the newer list does not name it"


async def test_credit_and_positions_of_any_value_harm_their_own_attempt_only():
    world = World()
    one, other = world.open(1), world.open(2)
    link = world.session()
    attach = link_pb2.LinkAttach
    say(
        link,
        hello(),
        Frame(
            attach=[
                attach(handle=1, transfer_id=one.transfer_id, next=[2**64 - 1], limit=[2**64 - 1]),
                attach(handle=2, transfer_id=other.transfer_id, next=[1], limit=[257]),
                attach(handle=2, transfer_id=other.transfer_id, next=[1] * 5000, limit=[1] * 5000),
                attach(handle=2**64 - 1, transfer_id=bytes(40_000), next=[0], limit=[0]),
            ],
            attach_done=link_pb2.AttachDone(next_handle=2**64 - 1),
        ),
    )
    credit = link_pb2.LinkCredit
    say(
        link,
        Frame(
            credit=[
                credit(handle=1, limit=2**64 - 1),
                credit(handle=1, choice=2**32 - 1, limit=2**64 - 1),
                credit(handle=2, choice=2**32 - 1, limit=2**64 - 1),
                credit(handle=2**64 - 1, limit=1),
            ]
        ),
    )
    for position in range(1, 11):
        for handle in (one, other):
            handle.log.add(0, position, position)
    link.flush()
    wire = link._transport
    columns = [frame.tokens for frame in wire.frames]  # type: ignore[attr-defined]
    tokens = [pair for column in columns for pair in zip(column.handle, column.token_id, strict=True)]
    assert [token for number, token in tokens if number == 2] == list(range(1, 11))
    (choice,) = one.log.choices
    assert choice.limit <= choice.end + 256


async def test_a_log_line_shows_the_beginning_of_a_router_id():
    link = World().session()
    say(link, hello(router_id="x" * 60_000))
    assert link.router_id == "x" * session.MAX_ROUTER_ID
