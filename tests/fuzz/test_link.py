"""The link, both ways: frames of a router that are nearly right or noise end their connection, or are answered; frames of
a worker that lies end its own link. Nothing else changes, and no exception is logged."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.addresses import split
from cluster.errors import BatonError, InvalidRequestError
from cluster.link.framing import MAX_FRAME_BYTES, FrameReader, to_frame
from cluster.membership.types import WorkerInfo
from cluster.protocol.link import LINK_VERSION, MIN_LINK_VERSION
from router.link.links import Links
from router.link.token import Token
from tests.fuzz.conftest import few
from tests.fuzz.messages import changed, damaged
from tests.fuzz.tally import ANSWERED, CLOSED, REFUSED, Tally
from tests.fuzz.worker_messages import message
from tests.fuzz.workers import Pair
from tests.harness.link_client import BlockingLinkClient, Reading, blocking_link_client
from wire import common_pb2, link_pb2
from worker.worker import Worker

SECONDS = 0.3  # for what a worker or a router does with the last frame
INCARNATIONS = itertools.count(1 << 32)
EPOCHS = itertools.count(1)
LIMIT = MAX_FRAME_BYTES - 4


# --- the framing -------------------------------------------------------------------------------------------

lengths = st.sampled_from([0, 1, 2, LIMIT - 1, LIMIT, LIMIT + 1, 2**16, 2**31, 2**32 - 1])


@few(100, 0.02)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 3, 4, 5, 255, LIMIT - 1, LIMIT]), max_size=4),
    last=lengths,
    cut=st.integers(1, 70_000),
)
def test_every_length_is_cut_or_refused(sizes, last, cut, tally):
    """At the bound itself, one below, one above, however the bytes arrive; at most one frame is held."""
    bodies = [secrets.token_bytes(size) for size in sizes]
    data = b"".join(len(body).to_bytes(4, "little") + body for body in bodies) + last.to_bytes(4, "little")
    reader, found, refused = FrameReader(), [], False
    for begin in range(0, len(data), cut):
        try:
            found += reader.feed(data[begin : begin + cut])
        except BatonError:
            refused = True
            break
        assert len(reader._rest) < MAX_FRAME_BYTES
    assert refused == (last > LIMIT)
    if not refused:
        assert found == bodies + ([b""] if last == 0 else [])
    tally.count("link: lengths", REFUSED if refused else ANSWERED)


@few(100, 0.02)
@given(chunks=st.lists(st.binary(max_size=50), max_size=8))
def test_bytes_of_any_kind_are_cut_or_refused(chunks, tally):
    reader = FrameReader()
    outcome = ANSWERED
    for chunk in chunks:
        try:
            reader.feed(chunk)
        except InvalidRequestError:
            outcome = REFUSED
            break
    tally.count("link: noise", outcome)


# --- a router that lies ------------------------------------------------------------------------------------


def conversation(worker: Worker, handle: int = 1) -> list[link_pb2.RouterFrame]:
    """Of a router that reads an attempt which the worker does not have."""
    attach = link_pb2.LinkAttach(transfer_id=bytes(16), handle=handle, next=[40], limit=[296])
    return [
        link_pb2.RouterFrame(
            hello=link_pb2.LinkHello(
                min_version=MIN_LINK_VERSION,
                max_version=LINK_VERSION,
                router_id="fuzz",
                incarnation=next(INCARNATIONS),
                serial=1,
                worker_id=worker._identity.worker_id,
                epoch=worker.epoch,
            )
        ),
        link_pb2.RouterFrame(attach=[attach]),
        link_pb2.RouterFrame(attach_done=link_pb2.AttachDone(next_handle=min(handle + 1, 2**64 - 1))),
        link_pb2.RouterFrame(beat=True),
        link_pb2.RouterFrame(credit=[link_pb2.LinkCredit(handle=handle, limit=300)]),
        link_pb2.RouterFrame(status=[handle]),
        link_pb2.RouterFrame(cancel=[handle]),
        link_pb2.RouterFrame(close=[handle]),
    ]


def say(worker: Worker, data: bytes, tally: Tally, kind: str) -> None:
    came = b""
    with socket.create_connection(split(worker._links.address), timeout=SECONDS) as sock:
        outcome = ANSWERED
        try:
            sock.sendall(data)
            while chunk := sock.recv(65536):
                came += chunk
            outcome = CLOSED
        except TimeoutError:
            pass
        except OSError:
            outcome = CLOSED
    for raw in FrameReader().feed(came):
        link_pb2.WorkerFrame.FromString(raw)
    tally.count(kind, outcome)


@pytest.mark.long
@few(40, 0.02)
@given(data=st.data())
def test_frames_that_are_nearly_right(data, pair: Pair, tally: Tally):
    """In any order, with repeats, each perhaps changed; sometimes before, or without, a greeting."""
    worker = data.draw(st.sampled_from([pair.prefill, pair.decode]))
    honest = conversation(worker, data.draw(st.sampled_from([1, 2**32 - 1, 2**32, 2**64 - 1])))
    order = data.draw(st.lists(st.integers(1, len(honest) - 1), max_size=10))
    said = [honest[0]] if data.draw(st.integers(0, 6)) else []
    said += [data.draw(changed(honest[index], 2)) for index in order]
    say(worker, b"".join(map(to_frame, said)), tally, "link: changed frames of a router")


@pytest.mark.long
@few(20, 0.02)
@given(data=st.data())
def test_greetings_that_are_nearly_right(data, pair: Pair, tally: Tally):
    worker = data.draw(st.sampled_from([pair.prefill, pair.decode]))
    honest = conversation(worker)
    said = [data.draw(changed(honest[0])), *honest[1:]]
    say(worker, b"".join(map(to_frame, said)), tally, "link: changed greetings of a router")


@few(40, 0.02)
@given(data=st.data())
def test_bytes_that_are_damaged(data, pair: Pair, tally: Tally):
    worker = data.draw(st.sampled_from([pair.prefill, pair.decode]))
    raw = b"".join(map(to_frame, conversation(worker)))
    say(worker, data.draw(damaged(raw) | st.binary(max_size=200)), tally, "link: damaged bytes of a router")


def test_they_still_compute(pair, channels):
    _, end = pair.answer(channels, "Decode/Run", message(pair, "Decode/Run", b"l" * 16, [7] * 30), 30.0)
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    pair.check_well()


# --- a worker that lies ------------------------------------------------------------------------------------


class Lenient(Reading):
    """Takes whatever comes."""

    def token(self, token: Token) -> None:
        self.came.set()


class LyingWorker:
    """Welcomes each link as the worker that it is taken for, then says what it is told to."""

    def __init__(self, client: BlockingLinkClient):
        self._client = client
        self.said = b""
        self.epoch = 0
        self.welcome = link_pb2.LinkWelcome()
        self._writers: list[asyncio.StreamWriter] = []
        self.address = client.run(self._start())

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        with contextlib.suppress(OSError):
            writer.write(to_frame(link_pb2.WorkerFrame(welcome=self.welcome)) + self.said)
            while await reader.read(65536):
                pass
        writer.close()

    async def stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    @property
    def next_handle(self) -> int:
        return self._links._identity.handle_after

    @property
    def _links(self) -> Links:
        return self._client._client.links

    async def _open(self, worker: WorkerInfo) -> Reading:
        reading = Lenient(secrets.token_bytes(16), 40, choices=2)
        reading.handle = self._links.open(worker, reading)
        return reading

    def converse(self, welcome: link_pb2.LinkWelcome, said: bytes) -> Reading:
        """An attempt that is read from it, for a moment."""
        self.welcome, self.said, self.epoch = welcome, said, welcome.epoch
        worker = WorkerInfo(
            worker_id="liar",
            epoch=self.epoch,
            slot=0,
            role="decode",
            model_id="m",
            address="127.0.0.1:1",
            metrics_address="",
            link_address=self.address,
            layout=b"",
            place="",
            host="h",
            max_model_len=4096,
            blocks_total=64,
        )
        reading = self._client.run(self._open(worker))
        with contextlib.suppress(TimeoutError, BatonError):
            self._client.end_of(reading, SECONDS)
        self._client.forget(reading)
        return reading


@pytest.fixture(scope="module")
def liar() -> Iterator[LyingWorker]:
    with blocking_link_client() as client:
        made = LyingWorker(client)
        made._links._identity.handle_after = 2**32 - 10  # beyond 32 bits after a few conversations
        yield made
        client.run(made.stop())


def frames_of_a_worker(number: int) -> list[link_pb2.WorkerFrame]:
    """Of the attempt with this handle."""
    token = common_pb2.Token(choice=1, position=40, token_id=5, finish=common_pb2.FINISH_REASON_STOP)
    columns = link_pb2.TokenColumns(
        handle=[number, number], choice=[0, 0], position=[40, 41], token_id=[7, 8]
    )
    return [
        link_pb2.WorkerFrame(beat=common_pb2.Beat(engine_step=1)),
        link_pb2.WorkerFrame(tokens=columns),
        link_pb2.WorkerFrame(extras=[link_pb2.HandleToken(handle=number, token=token)]),
        link_pb2.WorkerFrame(ends=[link_pb2.HandleEnd(handle=number)]),
        link_pb2.WorkerFrame(
            states=[link_pb2.HandleState(handle=number, kind=link_pb2.HandleState.OPEN, next=[40])]
        ),
        link_pb2.WorkerFrame(cancelled=[number]),
        link_pb2.WorkerFrame(notice=link_pb2.LINK_NOTICE_GO_AWAY),
        link_pb2.WorkerFrame(notice=link_pb2.LINK_NOTICE_FENCED),
    ]


@pytest.mark.long
@few(30, 0.02)
@given(data=st.data())
def test_a_worker_whose_frames_are_nearly_right(data, liar: LyingWorker, tally: Tally):
    honest = frames_of_a_worker(liar.next_handle)
    order = data.draw(st.lists(st.integers(0, len(honest) - 1), max_size=10))
    said = b"".join(to_frame(data.draw(changed(honest[index], 2))) for index in order)
    if data.draw(st.integers(0, 4)) == 0:
        said = data.draw(damaged(said) | st.binary(max_size=200))
    welcome = link_pb2.LinkWelcome(
        worker_id="liar", epoch=next(EPOCHS), version=LINK_VERSION, max_frame=MAX_FRAME_BYTES
    )
    if data.draw(st.integers(0, 4)) == 0:
        welcome = data.draw(changed(welcome))
    reading = liar.converse(welcome, said)
    tally.count("link: a worker that lies", ANSWERED if reading.error is None else REFUSED)


def test_an_honest_worker_is_read_beside_it(liar: LyingWorker, pair: Pair, channels):
    _, end = pair.answer(channels, "Decode/Run", message(pair, "Decode/Run", b"m" * 16, [9] * 30), 30.0)
    assert end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE, end
    pair.check_well()
