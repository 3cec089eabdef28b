"""One connection of a link: frames out and in, and the greeting. The link above it owns the handles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from cluster.errors import BatonError, InvalidRequestError
from cluster.link.framing import FrameReader, to_frame
from wire import link_pb2

log = logging.getLogger(__name__)
ENTRIES_A_TURN = 256  # of frames' tokens and ends between two turns of the event loop


class Frames(Protocol):
    """The link above a connection."""

    def take(self, connection: Connection, frame: link_pb2.WorkerFrame) -> Iterator[None] | None:
        """Dispatch a frame. An iterator, where it is large: each step is a piece."""

    def gone(self, connection: Connection, error: Exception | None) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, link: Frames, hello: link_pb2.LinkHello, certificates: int):
        """`certificates`: the version of the files that open it."""
        self._link = link
        self.certificates = certificates
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None  # uvloop's TLS transport is no asyncio.Transport
        self._frames = FrameReader()
        self.welcomed: asyncio.Future[link_pb2.LinkWelcome] = self._loop.create_future()
        self._unread: list[bytes] = []  # while a large frame is dispatched in pieces
        self._piece: Iterator[None] | None = None
        self.heard = self._loop.time()

    @property
    def serial(self) -> int:
        return self._hello.serial

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.write(link_pb2.RouterFrame(hello=self._hello))

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            self._unread += self._frames.feed(data)
            if self._piece is None:
                self._read()
        except BatonError as error:
            log.warning("link to worker %s closed: %s", self._hello.worker_id, error)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._unread.clear()
        self._piece = None
        if not self.welcomed.done():
            self.welcomed.set_exception(error or ConnectionResetError("closed before the welcome"))
            self.welcomed.exception()  # marks it retrieved: the attempt may be over
        self._link.gone(self, error)

    def write(self, frame: link_pb2.RouterFrame) -> None:
        self._transport.write(to_frame(frame))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _read(self) -> None:
        """Dispatch what has come: ENTRIES_A_TURN, and the rest in later turns of the loop."""
        taken = 0
        while self._unread and self._piece is None:
            try:
                frame = link_pb2.WorkerFrame.FromString(self._unread[0])
            except DecodeError as error:
                raise InvalidRequestError(f"not a frame: {error}", field="frame") from None
            entries = len(frame.tokens.handle) + len(frame.extras) + len(frame.ends)
            if taken and taken + entries > ENTRIES_A_TURN:
                self._piece = iter(())
            else:
                del self._unread[0]
                if not self.welcomed.done():
                    self.welcomed.set_result(frame.welcome)
                    continue
                taken += entries
                self._piece = self._link.take(self, frame)
            if self._piece is not None:
                self._transport.pause_reading()
                self._loop.call_soon(self._next_piece)

    def _next_piece(self) -> None:
        if self._piece is None:
            return  # the connection is gone
        if next(self._piece, self) is self:
            self._piece = None
            self._transport.resume_reading()
            try:
                self._read()
            except BatonError as error:
                log.warning("link to worker %s closed: %s", self._hello.worker_id, error)
                self.abort()
        else:
            self._loop.call_soon(self._next_piece)
