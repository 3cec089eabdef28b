"""One link's protocol at the worker: the router's frames in, the worker's frames out. No I/O of its own.

HELLO → ATTACHING → UP → MOVED      MOVED: a newer link owns the handles; its cancels and closes still count
   └────────┴────────┴─────┴──► ENDED
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol

from google.protobuf.message import DecodeError

from cluster.errors import InvalidRequestError
from cluster.link.framing import MAX_FRAME_BYTES, FrameReader, to_frame
from cluster.protocol.link import FRAME_ENTRIES, MIN_ATTACH_BYTES, common_version
from cluster.state_machine import StateMachine
from wire import common_pb2, link_pb2
from worker.link.handle import Handle
from worker.link.outgoing import Outgoing
from worker.link.routers import Routers
from worker.link.turns import ENTRIES_AT_ONCE, ENTRIES_PER_TURN

# Of received bytes, cut into frames at a time: an empty frame has 4, so these are at most ENTRIES_AT_ONCE frames.
PIECE_BYTES = 4 * ENTRIES_AT_ONCE
MAX_ROUTER_ID = 128  # characters that a log line shows


class State(Enum):
    HELLO = "hello"
    ATTACHING = "attaching"
    UP = "up"
    MOVED = "moved"
    ENDED = "ended"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.HELLO: frozenset({State.ATTACHING, State.ENDED}),
    State.ATTACHING: frozenset({State.UP, State.MOVED, State.ENDED}),
    State.UP: frozenset({State.MOVED, State.ENDED}),
    State.MOVED: frozenset({State.ENDED}),
}


class FrameTransport(Protocol):
    """The connection under a session."""

    def write(self, frame: bytes) -> None: ...

    def close(self) -> None:
        """After what was written has left."""

    def schedule(self) -> None:
        """Call `Session.flush` at the end of this turn, or once what was written has left."""


class WorkerFacts(Protocol):
    """The worker's id and epoch: worker.identity.WorkerIdentity."""

    worker_id: str
    epoch: int


class Session:
    """Call `received` with each chunk of bytes, then `read` until it has dispatched them; `flush` when the transport may
    be written, `closed` when it is gone."""

    def __init__(
        self,
        routers: Routers,
        facts: WorkerFacts,
        transport: FrameTransport,
        engine_step: Callable[[], int | None],
    ):
        """`engine_step`: the number of the engine's last step, None while it hangs."""
        self._routers = routers
        self._facts = facts
        self._transport = transport
        self._engine_step = engine_step
        self._frames = FrameReader()
        self._unread: deque[bytes] = deque()  # complete frames
        self._uncut = memoryview(b"")  # received behind them
        self._dispatching: Iterator[None] | None = None  # the frame before them
        self._outgoing = Outgoing()
        self._machine = StateMachine(State.HELLO, TRANSITIONS, "link")
        self.taken = 0
        self.router_id = ""
        self.incarnation = 0
        self.serial = 0
        self.version = 0

    @property
    def state(self) -> State:
        return self._machine.state

    # --- from the router -----------------------------------------------------------------------------------

    def received(self, data: bytes) -> bool:
        """Take bytes in. Returns whether frames wait to be dispatched. Raises BatonError, as `read` does."""
        self._uncut = memoryview(bytes(self._uncut) + data) if self._uncut else memoryview(data)
        self._cut()
        return bool(self._unread)

    def _cut(self) -> None:
        """Cut what was received until a frame is complete."""
        while self._uncut and not self._unread:
            piece, self._uncut = self._uncut[:PIECE_BYTES], self._uncut[PIECE_BYTES:]
            self._unread += self._frames.feed(bytes(piece))

    @property
    def unread(self) -> bool:
        """Whether frames wait to be dispatched, so that no more should be read."""
        return bool(self._unread) or self._dispatching is not None

    def read(self, entries: int = ENTRIES_PER_TURN) -> bool:
        """Dispatch up to `entries`; `taken` is how many. True: call again. False: everything is dispatched, or waits until
        the router has read its answers.

        Raises BatonError if the router breaks the protocol: its connection should be closed.
        """
        for self.taken in range(entries):
            if self._outgoing.full or self.state is State.ENDED:
                return False
            if self._dispatching is None:
                if not self._unread:
                    return False
                self._dispatching = self._take(self._parsed(self._unread.popleft()))
                self._cut()
            if next(self._dispatching, self) is self:
                self._dispatching = None
        self.taken = entries
        return self.unread

    @staticmethod
    def _parsed(message: bytes) -> link_pb2.RouterFrame:
        """The frame, which stays while its entries wait. Raises InvalidRequestError also where it has more of them than a
        router's can have."""
        try:
            frame = link_pb2.RouterFrame.FromString(message)
        except DecodeError as error:
            raise InvalidRequestError(f"not a frame: {error}", field="frame") from None
        entries = len(frame.credit) + len(frame.status) + len(frame.cancel) + len(frame.close)
        for field, count, limit in (
            ("frame", entries, FRAME_ENTRIES),
            ("attach", len(frame.attach), MAX_FRAME_BYTES // MIN_ATTACH_BYTES),
        ):
            if count > limit:
                raise InvalidRequestError(f"a frame of {count} entries", field=field, limit=str(limit))
        return frame

    def _take(self, frame: link_pb2.RouterFrame) -> Iterator[None]:
        """Dispatch a frame. A step is an entry."""
        if self.state is State.HELLO:
            if not frame.HasField("hello"):
                raise InvalidRequestError("the first frame has no hello", field="hello")
            self._greet(frame.hello)
            return
        if self.state is State.ATTACHING:
            for attach in frame.attach:
                self._routers.attach(self, attach)
                yield
            if frame.HasField("attach_done") and self._machine.may(State.UP):
                self._machine.to(State.UP)
                self._routers.attached(self, frame.attach_done.next_handle)
        for credit in frame.credit:
            if self.state is not State.MOVED:
                self._routers.credit(self, credit)
            yield
        for number in frame.status:
            if self.state is not State.MOVED:
                self._routers.status(self, number)
            yield
        for number in frame.cancel:
            self._routers.cancel(self, number)
            yield
        for number in frame.close:
            self._routers.close_handle(self, number)
            yield

    def _greet(self, hello: link_pb2.LinkHello) -> None:
        version = common_version(hello.min_version, hello.max_version)
        addressed = (hello.worker_id, hello.epoch) == (self._facts.worker_id, self._facts.epoch)
        welcome = link_pb2.LinkWelcome(version=version, max_frame=MAX_FRAME_BYTES)
        if addressed:  # another peer learns neither: without TLS anyone may greet
            welcome.worker_id, welcome.epoch = hello.worker_id, hello.epoch
        self._transport.write(to_frame(link_pb2.WorkerFrame(welcome=welcome)))
        self.router_id = hello.router_id[:MAX_ROUTER_ID]
        self.incarnation, self.serial, self.version = hello.incarnation, hello.serial, version
        if not version or not addressed or not hello.incarnation or not self._routers.greeted(self):
            self.end()
            return
        self._machine.to(State.ATTACHING)

    # --- from the handles ----------------------------------------------------------------------------------

    def due(self, handle: Handle) -> None:
        self._outgoing.due(handle)
        self._transport.schedule()

    def drop(self, number: int) -> None:
        self._outgoing.drop(number)

    def answer(self, state: link_pb2.HandleState) -> None:
        self._outgoing.state(state)
        self._transport.schedule()

    def cancelled(self, number: int, end: common_pb2.AttemptEnd | None = None) -> None:
        """Answer a cancel, by the attempt's `end` where that was not sent. Behind a newer link no end is read."""
        if self.state is not State.ENDED:
            self._outgoing.cancelled(number, end if self.state is State.UP else None)
            self._transport.schedule()

    def moved(self) -> None:
        """A newer link owns the handles: this one sends no more of them."""
        if self._machine.may(State.MOVED):
            self._machine.to(State.MOVED)
            self._outgoing.drop_all()
            self._outgoing.notice(link_pb2.LINK_NOTICE_MOVED)
            self._transport.schedule()

    def go_away(self) -> None:
        """Ask the router for another link."""
        if self.state in (State.ATTACHING, State.UP):
            self._outgoing.notice(link_pb2.LINK_NOTICE_GO_AWAY)
            self._transport.schedule()

    def fenced(self) -> None:
        """The epoch has ended."""
        if self.state is not State.ENDED:
            self._outgoing.drop_all()
            self._transport.write(to_frame(link_pb2.WorkerFrame(notice=link_pb2.LINK_NOTICE_FENCED)))
            self.end()

    # --- to the router -------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Every BEAT_SECONDS. An engine that hangs sends none."""
        step = self._engine_step()
        if step is not None and self.state in (State.ATTACHING, State.UP):
            self._outgoing.beat(step)
            self._transport.schedule()

    def flush(self) -> None:
        """Write the next frame, if there is anything to send and nothing unwritten is left."""
        if self._outgoing.empty or self.state is State.ENDED:
            return
        frame, ended = self._outgoing.next_frame()
        self._transport.write(to_frame(frame))
        for handle in ended:
            self._routers.sent_end(handle)
        if not self._outgoing.empty:
            self._transport.schedule()

    def end(self) -> None:
        """Close the connection after what was written."""
        if self.state is not State.ENDED:
            self._machine.to(State.ENDED)
            self._transport.close()

    def closed(self) -> None:
        """The connection is gone."""
        self._unread.clear()
        self._uncut = memoryview(b"")
        self._dispatching = None
        if self._machine.may(State.ENDED):
            self._machine.to(State.ENDED)
        self._routers.ended(self)
