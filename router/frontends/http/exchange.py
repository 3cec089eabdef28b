"""A request and its answer, written straight to the connection: no messages of ASGI, no task for each piece.

The protocol keeps uvicorn's cycle for it, so deadlines, pipelining, keep-alive and shutdown are those of every request.

    send                                 an answer of known length
    begin → write → write … → end        a stream
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from router.frontends.http.long_body import LongResponse, sliced

RawHeaders = Sequence[tuple[bytes, bytes]]


class Watcher(Protocol):
    """Called by the connection while an answer is made."""

    def disconnected(self) -> None: ...

    def resumed(self) -> None:
        """The client has read: the answer is no longer `paused`."""


class Exchange(Request):
    def __init__(self, cycle: RequestResponseCycle):
        super().__init__(cycle.scope, cycle.receive)  # type: ignore[arg-type]
        self._cycle = cycle
        self._flow, self._transport = cycle.flow, cycle.transport
        self._chunked = cycle.scope["http_version"] != "1.0"  # else the end of the connection ends the body
        self._watcher: Watcher | None = None
        self._added: RawHeaders = ()

    @property
    def begun(self) -> bool:
        return self._cycle.response_started

    @property
    def paused(self) -> bool:
        """The transport holds more than it should. It stays so until it is below its low-water mark."""
        return self._flow.write_paused

    def watch(self, watcher: Watcher) -> None:
        """The socket is read meanwhile, or the client's end would not be seen."""
        self._watcher = watcher
        self._cycle.flow.resume_reading()
        if self._cycle.disconnected:
            watcher.disconnected()

    def unwatch(self) -> None:
        self._watcher = None

    def disconnected(self) -> None:
        if self._watcher is not None:
            self._watcher.disconnected()

    def resumed(self) -> None:
        if self._watcher is not None:
            self._watcher.resumed()

    def add_headers(self, headers: RawHeaders) -> None:
        """Send them with the answer, whichever it is."""
        self._added = (*self._added, *headers)

    async def send(self, response: Response) -> None:
        """Write it once the client has read the answers before it. Nothing is sent after a stream has begun: the cycle
        then closes the connection."""
        await self.sent()
        if not self._cycle.disconnected and not self.begun:
            self._head(response.status_code, response.raw_headers)
            parts = response.slices() if isinstance(response, LongResponse) else sliced(bytes(response.body))
            await self._complete(parts)

    async def sent(self) -> None:
        """Wait until the client has read what was written, but for what the connection's buffers take, or has left."""
        if self.paused:
            await self._cycle.flow.drain()

    def begin(self, headers: RawHeaders) -> None:
        if not self._cycle.disconnected:
            framing = ((b"transfer-encoding", b"chunked"),) if self._chunked else ()
            self._head(200, (*headers, *framing))

    def write(self, piece: bytes) -> None:
        """Neither this piece nor the last one may be empty: that would end a chunked body."""
        if not self._cycle.disconnected:
            self._transport.write(self._framed(piece))

    async def end(self, piece: bytes) -> None:
        if not self._cycle.disconnected:
            await self._complete(sliced(self._framed(piece) + b"0\r\n\r\n" if self._chunked else piece))

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
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
        cycle.transport.write(b"".join(lines))

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
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


Endpoint = Callable[[Exchange], Awaitable[None]]
