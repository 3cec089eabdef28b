"""One connection of a link: frames out and in, and the greeting. The link above it owns the handles."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from cluster.errors import BatonError, InvalidRequestError, PeerLostError
from cluster.link.framing import FrameReader, to_frame
from wire import link_pb2

log = logging.getLogger(__name__)
ENTRIES_PER_TURN = 256  # dispatched in one turn of the event loop
FRAMES_PER_TURN = 64  # at most, however small


class ConnectionOwner(Protocol):
    """The link above a connection."""

    def take(
        self, connection: Connection, frame: link_pb2.WorkerFrame, entries: int
    ) -> Iterator[None] | None:
        """Dispatch a frame of so many `entries`. A large one is returned as an iterator, each step of which dispatches a
        piece."""

    def writable(self, connection: Connection) -> None:
        """The buffer of the transport is below its limit again."""

    def gone(self, connection: Connection, error: Exception | None) -> None:
        """The connection is closed."""


class Connection(asyncio.Protocol):
    """Sends its hello as soon as it is open. `welcomed` has the answer, or the error that closed the connection before it;
    later frames go to `link`."""

    def __init__(self, link: ConnectionOwner, hello: link_pb2.LinkHello, certificates: int):
        """`certificates`: the version of the certificate files with which it is opened."""
        self._link = link
        self.certificates = certificates
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # uvloop's TLS transport is no asyncio.Transport
        self._frames = FrameReader()
        self.welcomed: asyncio.Future[link_pb2.LinkWelcome] = self._loop.create_future()
        self._unread: deque[bytes] = deque()  # frames that wait while an earlier one is dispatched in pieces
        self._next: link_pb2.WorkerFrame | None = None  # parsed, for the next turn
        self._piece: Iterator[None] | None = None  # the rest of a large frame
        self._paused = False  # nothing is read from the socket
        self.received_at = self._loop.time()  # of the last bytes
        self.is_lost = False
        self.blocked_since = math.inf  # when the worker stopped reading
        self.malformed = False  # closed because the worker broke the protocol

    @property
    def serial(self) -> int:
        return self._hello.serial

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.write(link_pb2.RouterFrame(hello=self._hello))

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        try:
            self._unread += self._frames.feed(data)
        except BatonError as error:
            self._refuse(error)
        else:
            if not self._paused:
                self._read()

    def pause_writing(self) -> None:
        self.blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        self.blocked_since = math.inf
        self._link.writable(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._drop_unread()
        if not self.welcomed.done():
            self.welcomed.set_exception(error or ConnectionResetError("closed before the welcome"))
            self.welcomed.exception()  # marks it retrieved: the opener may have been cancelled
        self._link.gone(self, error)

    @property
    def blocked(self) -> bool:
        return self.blocked_since != math.inf

    def allow_delay(self, seconds: float) -> None:
        """Count a blocked write from later on: this process was late."""
        if self.blocked:
            self.blocked_since = min(self._loop.time(), self.blocked_since + seconds)

    def write(self, frame: link_pb2.RouterFrame) -> None:
        self._transport.write(to_frame(frame))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read(self) -> None:
        """Dispatch ENTRIES_PER_TURN, and the rest in later turns of the event loop. The socket is not read meanwhile."""
        try:
            if self._piece is None:
                self._take_frames()
            elif next(self._piece, self) is self:
                self._piece = None
        except BatonError as error:
            self._refuse(error)
            return
        more = self._piece is not None or self._next is not None or bool(self._unread)
        if more:
            self._loop.call_soon(self._read)
        if more != self._paused and not self._transport.is_closing():
            self._paused = more
            self._transport.pause_reading() if more else self._transport.resume_reading()

    def _take_frames(self) -> None:
        taken = 0
        for _ in range(FRAMES_PER_TURN):
            if self._next is None:
                if not self._unread:
                    return
                self._next = _parsed(self._unread.popleft())
            entries = entries_of(self._next)
            if taken and taken + entries > ENTRIES_PER_TURN:
                return
            frame, self._next = self._next, None
            if not self.welcomed.done():
                self.welcomed.set_result(frame.welcome)
                continue
            taken += entries
            self._piece = self._link.take(self, frame, entries)
            if self._piece is not None:
                return

    def _refuse(self, error: BatonError) -> None:
        log.warning("link to worker %s closed: %s", self._hello.worker_id, error)
        self.malformed = True
        self._drop_unread()
        if not self.welcomed.done():
            self.welcomed.set_exception(PeerLostError(f"no welcome: {error}"))
        self.abort()

    def _drop_unread(self) -> None:
        self._unread.clear()
        self._next = self._piece = None


def entries_of(frame: link_pb2.WorkerFrame) -> int:
    """The number of entries by which the work of a turn is bounded."""
    about_tokens = len(frame.tokens.handle) + len(frame.extras) + len(frame.ends)
    return about_tokens + len(frame.cancelled) + len(frame.states)


def _parsed(message: bytes) -> link_pb2.WorkerFrame:
    try:
        return link_pb2.WorkerFrame.FromString(message)
    except DecodeError as error:
        raise InvalidRequestError(f"not a frame: {error}", field="frame") from None
