"""A small HTTP/1.1 client that notes when bytes arrive at the socket, not when its user reads them.

A connection carries one request at a time, and is kept for the next one.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from loadgen.target import Clock, RequestFailed

MAX_UNREAD_PIECES = 1024


@dataclass
class _Exchange:
    """One answer as it arrives: pieces of (arrival, bytes), then None at the end."""

    pieces: asyncio.Queue[tuple[float, bytes] | None] = field(default_factory=asyncio.Queue)
    status: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    error: str = ""
    ended: bool = False


class HttpConnection(asyncio.Protocol):
    """A connection of HttpPool, with the callbacks of asyncio and of httptools."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._exchange: _Exchange | None = None
        self._parser: httptools.HttpResponseParser = httptools.HttpResponseParser(self)
        self._arrival = 0.0
        self._paused = False
        self.reusable = True

    def begin(self, request: bytes) -> None:
        """Send a request. Raises RequestFailed if the server has closed the connection."""
        assert self._transport is not None
        if not self.reusable:
            raise RequestFailed("connection", "the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._exchange = _Exchange()
        self._transport.write(request)

    async def status(self) -> int:
        assert self._exchange is not None
        return await self._exchange.status

    async def piece(self) -> tuple[float, bytes] | None:
        """The next piece of the body; None at its end. Raises RequestFailed when the connection broke."""
        exchange, transport = self._exchange, self._transport
        assert exchange is not None
        assert transport is not None
        item = await exchange.pieces.get()
        if self._paused and exchange.pieces.empty():
            self._paused = False
            transport.resume_reading()
        if item is None and exchange.error:
            raise RequestFailed("connection", exchange.error)
        return item

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrival = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._end(f"connection lost: {error}" if error else "the server closed the connection")

    def on_headers_complete(self) -> None:
        if self._exchange is not None and not self._exchange.status.done():
            self._exchange.status.set_result(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        if self._exchange is None or self._transport is None:
            return
        self._exchange.pieces.put_nowait((self._arrival, body))
        if self._exchange.pieces.qsize() > MAX_UNREAD_PIECES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        self._end("")

    def _end(self, error: str) -> None:
        exchange = self._exchange
        if exchange is None or exchange.ended:
            return
        exchange.ended = True
        exchange.error = error
        exchange.pieces.put_nowait(None)
        if not exchange.status.done():
            exchange.status.set_exception(RequestFailed("connection", error))
            exchange.status.exception()  # read here: asyncio would log it if the request was cancelled


class HttpPool:
    """Connections to one `http://host:port`, or `https://…` with `tls`."""

    def __init__(self, url: str, clock: Clock, api_key: str = "", tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r}: the target is http://host:port or https://host:port")
        secure = parts.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        name = f"[{self._host}]" if ":" in self._host else self._host  # brackets around an address of IPv6
        self._authority = f"{name}:{self._port}"
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._path = parts.path.rstrip("/")
        self._clock = clock
        self._idle: list[HttpConnection] = []

    async def begin(self, request: bytes) -> tuple[HttpConnection, int]:
        """Send a request; returns its connection and the answer's status. Raises RequestFailed.

        A server may close a kept connection while the next request is sent: that request is sent again on a new one.
        """
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await self._try(connection, request)
            except RequestFailed:
                continue
        connection = await self._connect()
        return connection, await self._try(connection, request)

    async def _try(self, connection: HttpConnection, request: bytes) -> int:
        try:
            connection.begin(request)
            return await connection.status()
        except BaseException:
            connection.close()
            raise

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            # asyncio sets TCP_NODELAY on every TCP socket
            _, connection = await loop.create_connection(
                lambda: HttpConnection(self._clock), self._host, self._port, ssl=self._tls
            )
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            raise RequestFailed("connection", str(error)) from error
        return connection

    def release(self, connection: HttpConnection, *, finished: bool) -> None:
        """Keep the connection, or close it if its answer was not read to the end: that cancels the request."""
        if finished and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._authority}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"{self._authorization}\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports close their sockets
