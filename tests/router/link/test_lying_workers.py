"""A worker that lies on its link: it loses its own attempts, the others' links go on, in bounded memory and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cluster.errors import PeerLostError
from cluster.link.framing import MAX_FRAME_BYTES, to_frame
from router.link import links as all_links
from router.link import outgoing
from router.link.connection import ENTRIES_PER_TURN, FRAMES_PER_TURN, entries_of
from router.link.links import Links
from tests.harness.linked_worker import LinkedWorker
from tests.harness.waiting import until
from tests.router.link.conftest import Reading, info, tokens
from wire import common_pb2, link_pb2

Frame = link_pb2.WorkerFrame
Lies = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class LyingWorker:
    """Welcomes each link, then `lies`."""

    def __init__(
        self, links: Links, lies: Lies, welcome: link_pb2.LinkWelcome | None = None, behind: bytes = b""
    ):
        """`behind`: in one write with the welcome."""
        self._behind = behind
        self._links = links
        self._lies = lies
        self._welcome = welcome or link_pb2.LinkWelcome(worker_id="l", epoch=9, version=1)
        self._writers: list[asyncio.StreamWriter] = []
        self.welcomed = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        worker = LinkedWorker("l", 9)
        worker._listener._socket = self._server.sockets[0]  # type: ignore[assignment]
        self.reading = Reading(bytes(16))
        self.reading.handle = self._links.open(info(worker), self.reading)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self.welcomed += 1
        with contextlib.suppress(OSError):
            writer.write(to_frame(Frame(welcome=self._welcome)) + self._behind)
            await self._lies(reader, writer)
            writer.close()

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def link(self) -> Any:
        return self._links._links["l@0000000000000009"]


@pytest.fixture
async def lying(pair: Any) -> AsyncIterator[Callable[..., Awaitable[LyingWorker]]]:
    """Starts one beside an honest worker, whose attempt is read to the end of the test."""
    honest = pair.read()
    await pair.up()
    made: list[LyingWorker] = []

    async def start(lies: Lies, **how: Any) -> LyingWorker:
        made.append(LyingWorker(pair.links, lies, **how))
        await made[-1].start()
        return made[-1]

    yield start
    tokens(honest.log, 0, 3)
    await until(lambda: honest.tokens == [[0, 1, 2]], "the honest worker's link goes on", 10)
    assert honest.error is None
    await pair.links.close()
    for one in made:
        await one.stop()


def says(data: bytes, after: float = 0.0) -> Lies:
    async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after)
        writer.write(data)
        while await reader.read(1 << 16):
            pass

    return lies


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 100,
        (MAX_FRAME_BYTES - 3).to_bytes(4, "little"),
        (5).to_bytes(4, "little") + b"\xff" * 5,
        to_frame(Frame(beat=common_pb2.Beat(engine_step=1))) + (5).to_bytes(4, "little") + b"\xff" * 5,
    ],
    ids=["length", "one byte too long", "no message", "after a beat"],
)
async def test_a_worker_that_breaks_the_protocol_twice_is_lost(junk, lying, pair):
    """The first time may be the network's fault; its attempts attach again."""
    worker = await lying(says(junk, after=0.2))
    await until(lambda: worker.reading.error is not None, "its attempt is lost", 10)
    assert isinstance(worker.reading.error, PeerLostError) and "twice" in str(worker.reading.error)
    assert worker.welcomed == 2 and "l@0000000000000009" in pair.links.suspects


async def test_a_worker_that_breaks_the_protocol_with_its_welcome_is_lost_at_once(lying, pair):
    worker = await lying(says(b""), behind=b"\xff" * 100)
    await until(lambda: worker.reading.error is not None, "its attempt is lost", 10)
    assert worker.welcomed == 1 and "l@0000000000000009" in pair.links.suspects


async def test_a_link_that_ends_at_once_is_opened_ever_more_slowly(lying):
    async def ends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0)

    worker = await lying(ends)
    await asyncio.sleep(1.5)
    assert 2 <= worker.welcomed <= 10


HALF_A_FRAME = to_frame(Frame(cancelled=range(10_000)))[:-1]


@pytest.mark.parametrize("silence", [b"", b"\x10", (MAX_FRAME_BYTES - 4).to_bytes(4, "little"), HALF_A_FRAME])
async def test_half_a_frame_and_silence_are_no_life(silence, lying, monkeypatch):
    monkeypatch.setattr(all_links, "LOST_SECONDS", 1.0)
    worker = await lying(says(silence))
    await until(lambda: worker.reading.error is not None, "its attempt is lost", 10)
    assert "no message received" in str(worker.reading.error)


async def test_a_worker_that_beats_and_does_not_read_is_lost(lying, pair, monkeypatch):
    """What it does not read waits in lists that are bounded, and its ends of unknown handles make them no longer."""
    monkeypatch.setattr(all_links, "LOST_SECONDS", 2.0)
    monkeypatch.setattr(outgoing, "MAX_CLOSES", 5000)
    flood = Frame(beat=common_pb2.Beat(engine_step=1))
    flood.ends.extend(link_pb2.HandleEnd(handle=2**64 - 1 - number) for number in range(5000))
    seen: list[tuple[int, int]] = []

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        while True:
            writer.write(to_frame(flood))
            await writer.drain()
            link = worker.link
            if link._connection is not None:
                waiting = link._connection._transport.get_write_buffer_size()
                seen.append((len(link._outgoing._close), waiting))

    worker = await lying(floods)
    await until(lambda: worker.reading.error is not None, "its attempt is lost", 60)
    assert max(closes for closes, _ in seen) <= 5000
    assert max(waiting for _, waiting in seen) <= 16 * MAX_FRAME_BYTES


@pytest.mark.parametrize(
    "frame",
    [
        Frame(cancelled=range(4 * ENTRIES_PER_TURN)),
        Frame(states=[link_pb2.HandleState(handle=n) for n in range(1000, 1000 + 4 * ENTRIES_PER_TURN)]),
        Frame(ends=[link_pb2.HandleEnd(handle=n) for n in range(1000, 1000 + 4 * ENTRIES_PER_TURN)]),
        Frame(
            tokens=link_pb2.TokenColumns(
                **{c: [1] * 4 * ENTRIES_PER_TURN for c in ("handle", "choice", "position", "token_id")}
            )
        ),
    ],
    ids=["cancelled", "states", "ends", "tokens"],
)
async def test_a_frame_of_many_entries_takes_several_turns(frame, pair):
    await pair.links.close()
    pair.links = Links("r")
    pair.read(opened=False, taken_in=False)
    await pair.up()
    pieces = pair.link.take(pair.link._connection, frame, entries_of(frame))
    assert pieces is not None and len(list(pieces)) == 4


async def test_many_small_frames_take_several_turns(pair):
    pair.read(opened=False, taken_in=False)
    await pair.up()
    connection, taken = pair.link._connection, 0
    take = pair.link.take

    def counted(*given: Any) -> Any:
        nonlocal taken
        taken += 1
        return take(*given)

    pair.link.take = counted
    connection.data_received(to_frame(Frame()) * (4 * FRAMES_PER_TURN))
    assert taken <= FRAMES_PER_TURN and connection._paused
    await until(lambda: taken >= 4 * FRAMES_PER_TURN, "the rest comes")
    await until(lambda: not connection._paused, "it reads on")
    assert pair.links.up() == 1


@pytest.mark.parametrize(
    "said",
    [
        Frame(
            tokens=link_pb2.TokenColumns(handle=[1] * 9, choice=[0], position=[2**64 - 1] * 3, token_id=[])
        ),
        Frame(extras=[link_pb2.HandleToken(handle=2**64 - 1, token=common_pb2.Token(position=2**64 - 1))]),
        Frame(ends=[link_pb2.HandleEnd(handle=0)] * 1000),
        Frame(states=[link_pb2.HandleState(handle=2**64 - 1, next=[2**64 - 1] * 500)]),
        Frame.FromString(to_frame(Frame(cancelled=[2**64 - 1] * 1000))[4:] + b"\x10\x63"),
        Frame(welcome=link_pb2.LinkWelcome(worker_id="x" * 60_000)),
        Frame(notice=link_pb2.LINK_NOTICE_MOVED),
    ],
    ids=["columns", "extras", "ends", "states", "cancelled", "welcome", "moved"],
)
async def test_values_of_any_size_change_nothing(said, lying):
    worker = await lying(
        says(to_frame(said) + to_frame(Frame(beat=common_pb2.Beat(engine_step=1))), after=0.1)
    )
    await until(lambda: worker.welcomed == 1, "it is welcomed")
    await asyncio.sleep(0.3)
    assert worker.welcomed == 1 and worker.reading.error is None


async def test_an_error_names_a_foreign_worker_in_few_characters(lying):
    foreign = link_pb2.LinkWelcome(worker_id="\n" + "x" * 60_000, epoch=1, version=1)
    worker = await lying(says(b""), welcome=foreign)
    await until(lambda: worker.reading.error is not None, "it is lost", 10)
    assert len(str(worker.reading.error)) < 200 and "\n" not in str(worker.reading.error)


async def test_an_attempt_that_was_not_cancelled_and_is_said_to_be_is_lost(lying):
    """Its handle was forgotten, and its request waited for its deadline."""
    worker = await lying(says(to_frame(Frame(cancelled=range(1, 10))), after=0.1))
    await until(lambda: worker.reading.error is not None, "its attempt is lost", 10)
    assert isinstance(worker.reading.error, PeerLostError) and "cancelled" in str(worker.reading.error)


async def test_a_worker_that_asks_for_one_link_after_another_gets_few(lying):
    """Each is a connection that stays open for a minute."""
    worker = await lying(says(to_frame(Frame(notice=link_pb2.LINK_NOTICE_GO_AWAY)), after=0.01))
    await until(lambda: worker.welcomed >= 2, "the link moves")
    await asyncio.sleep(1.5)
    assert worker.welcomed <= 5 and worker.reading.error is None
