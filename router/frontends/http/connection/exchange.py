"""A request and its answer, written straight to the connection: no messages of ASGI, no task for each piece.

The protocol keeps uvicorn's cycle for it, so deadlines, pipelining, keep-alive and shutdown are those of every request.

    send                                 an answer of known length
    begin → write → write … → end        a stream, begun with its first piece; what is long is written as its client reads
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from router.frontends.http.connection.long_body import SLICE_BYTES, LongResponse, in_slices, sliced

RawHeaders = Sequence[tuple[bytes, bytes]]
# Of a stream. Several pieces may be made when they are written; none may be empty, which would end a chunked body.
Written = bytes | Iterable[bytes]


class Watcher(Protocol):
    """Called by the connection while an answer is made."""

    def disconnected(self) -> None: ...

    def resumed(self) -> None:
        """The client has read: the answer is no longer `paused`."""


class Exchange(Request):
    def __init__(self, cycle: RequestResponseCycle, linger: Callable[[], None]):
        """`linger` closes the connection of a client that still sends."""
        super().__init__(cycle.scope, cycle.receive)  # type: ignore[arg-type]
        self._cycle, self._linger = cycle, linger
        self._flow, self._transport = cycle.flow, cycle.transport
        self._chunked = cycle.scope["http_version"] != "1.0"  # else the end of the connection ends the body
        self._watcher: Watcher | None = None
        self._added: RawHeaders = ()
        self._unwritten: deque[Iterator[bytes | memoryview]] = deque()  # of a stream, in slices
        self._writing = False  # _write_on will be called
        self._all_written: asyncio.Future[None] | None = None

    @property
    def begun(self) -> bool:
        return self._cycle.response_started

    @property
    def has_left(self) -> bool:
        """Whether its client has disconnected."""
        return bool(self._cycle.disconnected)

    @property
    def paused(self) -> bool:
        """The transport holds more than it should, until it is below its low-water mark; or slices wait for it."""
        return self._flow.write_paused or bool(self._unwritten)

    def watch(self, watcher: Watcher) -> None:
        """The socket is read meanwhile, or the client's end would not be seen."""
        self._watcher = watcher
        self._cycle.flow.resume_reading()
        if self._cycle.disconnected:
            watcher.disconnected()

    def unwatch(self) -> None:
        self._watcher = None

    def disconnected(self) -> None:
        self._unwritten.clear()
        self._tell_all_written()
        if self._watcher is not None:
            self._watcher.disconnected()

    def resumed(self) -> None:
        if self._unwritten:
            self._write_on()
        elif self._watcher is not None:
            self._watcher.resumed()

    def add_headers(self, headers: RawHeaders) -> None:
        """Send them with the answer, whichever it is."""
        self._added = (*self._added, *headers)

    async def send(self, response: Response) -> None:
        """Write it once the client has read the answers before it. Nothing is sent after a stream has begun: the cycle
        then closes the connection."""
        await self.sent()
        if not self._cycle.disconnected and not self.begun:
            self._transport.write(self._head(response.status_code, response.raw_headers))
            parts = response.slices() if isinstance(response, LongResponse) else sliced(bytes(response.body))
            await self._complete(parts)

    async def sent(self) -> None:
        """Wait until the client has read what was written, but for what the connection's buffers take, or has left."""
        if self._flow.write_paused:
            await self._flow.drain()

    def begin(self, headers: RawHeaders, piece: Written = b"") -> None:
        """With the first piece of the stream, if there is one yet: a short one leaves with the head, in one write."""
        if self._cycle.disconnected:
            return
        framing = ((b"transfer-encoding", b"chunked"),) if self._chunked else ()
        head = self._head(200, (*headers, *framing))
        if isinstance(piece, bytes) and len(piece) <= SLICE_BYTES:
            self._transport.write(b"".join((head, self._framed(piece))) if piece else head)
        else:
            self._transport.write(head)
            self.write(piece)

    def write(self, piece: Written) -> None:
        if self._cycle.disconnected:
            return
        if isinstance(piece, bytes):
            if len(piece) <= SLICE_BYTES and not self._unwritten:
                # `_framed` without its call: most tokens come here
                self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
                return
            piece = (piece,)
        self._unwritten.append(in_slices(piece))
        if not self._writing:
            self._write_on()

    def _write_on(self) -> None:
        """Write one slice per turn of the loop while the client reads."""
        self._writing = False
        while self._unwritten and not self._flow.write_paused:
            try:
                piece = next(self._unwritten[0], None)
            except Exception:
                self._transport.abort()  # what was written is no answer, and no more will come
                raise
            if piece is None:
                self._unwritten.popleft()
                continue
            self._transport.write(self._framed(piece))
            if not self._flow.write_paused:  # else it is called once that has ended
                self._writing = True
                asyncio.get_running_loop().call_soon(self._write_on)
            return
        if not self._unwritten:
            self._tell_all_written()
            self.resumed()

    def _tell_all_written(self) -> None:
        if self._all_written is not None and not self._all_written.done():
            self._all_written.set_result(None)

    async def written(self) -> None:
        """Wait until the transport has all of the stream so far, or the client has left."""
        if self._unwritten:
            self._all_written = asyncio.get_running_loop().create_future()
            await self._all_written

    async def end(self, piece: Written) -> None:
        """Once all that precedes it is `written`."""
        if self._cycle.disconnected:
            return
        if isinstance(piece, bytes) and len(piece) <= SLICE_BYTES:
            await self._complete([b"".join((self._framed(piece), b"0\r\n\r\n")) if self._chunked else piece])
        else:
            await self._complete(self._to_end((piece,) if isinstance(piece, bytes) else piece))

    def _to_end(self, pieces: Iterable[bytes]) -> Iterator[bytes | memoryview]:
        for piece in in_slices(pieces):
            yield self._framed(piece)
        if self._chunked:
            yield b"0\r\n\r\n"

    def _framed(self, piece: bytes | memoryview) -> bytes | memoryview:
        return b"".join((b"%x\r\n" % len(piece), piece, b"\r\n")) if self._chunked else piece

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """To be written at once: the answer has begun."""
        cycle = self._cycle
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *self._added, *headers):
            if HEADER_VALUE_RE.search(value):
                raise ValueError(f"invalid value of header {name!r}")
            if name == b"connection":  # only ever `close`
                cycle.keep_alive = False
            else:
                lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(lines)

    async def _complete(self, slices: Iterable[bytes | memoryview]) -> None:
        """Write the end of the answer as its client reads it: the transport holds few slices."""
        cycle = self._cycle
        last: bytes | memoryview = b""
        for index, piece in enumerate(slices):
            if index:
                cycle.transport.write(last)
                await asyncio.sleep(0)
                await self.sent()
                if cycle.disconnected:
                    return
            last = piece
        cycle.transport.write(last)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive and not cycle.more_body:
            cycle.transport.close()
        cycle.on_response()
        if not cycle.keep_alive and cycle.more_body:
            self._linger()  # closed at once, with unread bytes, the answer could be lost


Endpoint = Callable[[Exchange], Awaitable[None]]
