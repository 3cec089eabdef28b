"""A worker's links without sockets, event loop's turns or an engine: each frame is sent and read by the test."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cluster.link.framing import FrameReader, to_frame
from cluster.protocol.link import LINK_VERSION, WINDOW_TOKENS, window_of
from wire import common_pb2, link_pb2
from worker.attempt_log import AttemptLog
from worker.link.handle import Handle, key_of
from worker.link.routers import Routers
from worker.link.session import Session

INCARNATION = 5


@dataclass
class HandWorker:
    """What is cancelled waits for `free`."""

    worker_id: str = "d"
    epoch: int = 9
    cancelled: list[bytes] = field(default_factory=list)
    credited: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.handles: dict[bytes, Handle] = {}
        self.routers = Routers(
            cancel=self._cancel, forget=self.forget, credited=self.credited.append, detach_seconds=0.2
        )
        self.free = asyncio.Event()  # blocks and staging of what is cancelled
        self.free.set()

    async def _cancel(self, transfer_id: bytes) -> None:
        self.cancelled.append(transfer_id)
        await self.free.wait()
        self.forget(transfer_id)

    def forget(self, transfer_id: bytes) -> None:
        handle = self.handles.pop(transfer_id, None)
        if handle is not None:
            self.routers.closed(handle)

    def open(self, number: int, choices: int = 1, incarnation: int = INCARNATION) -> AttemptLog:
        reference = common_pb2.HandleRef(incarnation=incarnation, number=number)
        key = key_of(reference)
        self.routers.check_free(key)
        transfer_id = transfer(number, incarnation)
        handle = Handle(key, transfer_id, common_pb2.GenerateSpec(n=choices))
        self.handles[transfer_id] = handle
        self.routers.open(handle)
        return handle.log


def transfer(number: int, incarnation: int = INCARNATION) -> bytes:
    return incarnation.to_bytes(8, "big") + number.to_bytes(8, "big")


class HandLink:
    """One connection of a router. Implements worker.link.session.FrameTransport."""

    def __init__(
        self,
        worker: HandWorker,
        serial: int,
        incarnation: int = INCARNATION,
        version: int = LINK_VERSION,
        epoch: int | None = None,
    ):
        """`epoch`: that it greets; None: the worker's."""
        self.closed = False
        self.sizes: list[int] = []  # of the frames that came
        self._frames = FrameReader()
        self._came: list[link_pb2.WorkerFrame] = []
        self.incarnation = incarnation
        self.step: int | None = 1  # the engine's; None: it hangs
        self.session = Session(worker.routers, worker, self, lambda: self.step)
        self.send(
            hello=link_pb2.LinkHello(
                min_version=1,
                max_version=version,
                router_id="r",
                incarnation=incarnation,
                serial=serial,
                worker_id=worker.worker_id,
                epoch=worker.epoch if epoch is None else epoch,
            )
        )

    def send(self, **fields: object) -> None:
        self.session.received(to_frame(link_pb2.RouterFrame(**fields)))  # type: ignore[arg-type]
        while self.session.read():
            pass

    def attach(self, numbers: list[int], *, next_handle: int = 1000, choices: int = 1, at: int = 0) -> None:
        window = window_of(choices) if self.session.version > 1 else WINDOW_TOKENS
        attaches = [
            link_pb2.LinkAttach(
                transfer_id=transfer(number, self.incarnation),
                handle=number,
                next=[at] * choices,
                limit=[at + window] * choices,
            )
            for number in numbers
        ]
        self.send(attach=attaches, attach_done=link_pb2.AttachDone(next_handle=next_handle))

    def read(self) -> list[link_pb2.WorkerFrame]:
        """Every frame until nothing is due."""
        while not self.session._outgoing.empty and not self.closed:
            before = len(self.sizes)
            self.session.flush()
            assert len(self.sizes) > before, "due, but not sent"
            while self.session.read():  # answers that left make room for more
                pass
        came, self._came = self._came, []
        return came

    def read_one(self) -> link_pb2.WorkerFrame:
        self.session.flush()
        return self._came.pop()

    def write(self, frame: bytes) -> None:
        self.sizes.append(len(frame))
        self._came += map(link_pb2.WorkerFrame.FromString, self._frames.feed(frame))

    def close(self) -> None:
        self.closed = True

    def schedule(self) -> None:
        """The test reads."""


def kinds(frames: list[link_pb2.WorkerFrame]) -> dict[int, str]:
    """Answers by handle."""
    return {
        state.handle: link_pb2.HandleState.Kind.Name(state.kind) for frame in frames for state in frame.states
    }


def notices(frames: list[link_pb2.WorkerFrame]) -> list[str]:
    return [link_pb2.LinkNotice.Name(frame.notice)[12:] for frame in frames if frame.notice]


def rows(frames: list[link_pb2.WorkerFrame]) -> list[tuple[int, int, int]]:
    """Handle, choice and position of each token, extras last in their frame."""
    found = []
    for frame in frames:
        columns = frame.tokens
        found += list(zip(columns.handle, columns.choice, columns.position, strict=True))
        found += [(extra.handle, extra.token.choice, extra.token.position) for extra in frame.extras]
    return found


def done() -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)


def up(worker: HandWorker, *numbers: int, serial: int = 1) -> HandLink:
    """A link that has attached these handles and read the answers."""
    link = HandLink(worker, serial)
    link.attach(list(numbers))
    link.read()
    return link
