"""HTTP for probes and scrapes, at a port without a key: one short request per connection, on one thread of its own.

    accepted ──head──► answered by `respond` ──► sent ──► half closed ──the client closes──► closed

A connection has HEAD_SECONDS for its head, CONNECTION_SECONDS for its answer, and LINGER_SECONDS after it. Where too many
are open, OpenConnections says which is closed; AcceptPace bounds the thread's processor time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.accept_pace import AcceptPace
from cluster.open_connections import OpenConnections
from cluster.sockets import listen, network_of

log = logging.getLogger(__name__)
CONNECTION_SECONDS = 10.0  # Prometheus's default scrape timeout
HEAD_SECONDS = 2.0
MAX_CONNECTIONS = 64
BACKLOG = 1024
HEAD_BYTES = 16 << 10
HEAD_READS = 32  # each wakes the thread, for one byte as for all
# Closing a socket with unread bytes, of a body for example, resets it: the client could lose the answer.
LINGER_SECONDS = 1.0
LINGER_READS = 64
LINGER_READ_BYTES = 64 << 10
RETRY_SECONDS = 0.1  # after an accept that failed: no descriptor is free
POLL_SECONDS = 0.25  # between two checks for connections over their time


# RFC 9110, section 9.3, and PATCH (RFC 5789)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"})


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # without slashes at its ends, and without a query
    accept: str  # the `Accept` headers


@dataclass(frozen=True)
class Answer:
    status: str
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()  # further ones


BAD_REQUEST = Answer("400 Bad Request", "text/plain", b"not an HTTP request, or a head that is too long\n")
NOT_ALLOWED = Answer(
    "405 Method Not Allowed", "text/plain", b"this port answers GET and HEAD\n", ("Allow: GET, HEAD",)
)
NOT_IMPLEMENTED = Answer("501 Not Implemented", "text/plain", b"this port answers GET and HEAD\n")
FAILED = Answer("500 Internal Server Error", "text/plain", b"the request failed; the log has the reason\n")


def parse(head: bytes) -> Request | None:
    """Return the request of a head, which is given without its last empty line, or None if it is not HTTP/1."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers = (line.partition(":") for line in lines)
    accept = [value.strip() for name, _, value in headers if name.lower() == "accept"]
    return Request(words[0], words[1].partition("?")[0].strip("/"), ",".join(accept))


Respond = Callable[[Request, "Connection"], None]


class Connection:
    """Reads one request, which goes to `respond`; that calls `send` with the answer, at once or later. On the server's
    thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        accepted: socket.socket,
        respond: Respond,
        closed: Callable[[Connection], None],
    ):
        self._loop = loop
        self._socket = accepted
        self._respond = respond
        self._closed = closed
        self._since = time.monotonic()
        self._until = self._since + HEAD_SECONDS
        self._head = b""
        self._reads = 0
        self._without_body = False
        self._unsent = memoryview(b"")
        loop.add_reader(accepted.fileno(), self._read)

    def overdue(self, now: float) -> bool:
        return now > self._until

    def close(self) -> None:
        """Close the socket; without effect once it is closed."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._closed(self)

    def _read(self) -> None:
        try:
            data = self._socket.recv(HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._head += data
        self._reads += 1
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if end and len(head) <= HEAD_BYTES:
            self._begin(parse(head))
        elif len(self._head) > HEAD_BYTES or self._reads >= HEAD_READS:
            self._begin(None)

    def _begin(self, request: Request | None) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._until = self._since + CONNECTION_SECONDS
        if request is None:
            self.send(BAD_REQUEST)
        elif request.method not in ("GET", "HEAD"):
            self.send(NOT_ALLOWED if request.method in METHODS else NOT_IMPLEMENTED)
        else:
            self._without_body = request.method == "HEAD"
            self._answer(request)

    def _answer(self, request: Request) -> None:
        try:
            self._respond(request, self)
        except Exception:  # RuntimeError among them: the system has no thread left
            log.exception("a request to the port of probes and metrics failed")
            self.send(FAILED)

    def send(self, answer: Answer) -> None:
        """Send the answer, and close the connection; without effect once it is closed."""
        if self._socket.fileno() < 0:
            return
        head = [
            f"HTTP/1.0 {answer.status}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            *answer.headers,
            "Connection: close\r\n\r\n",
        ]
        self._unsent = memoryview("\r\n".join(head).encode() + (b"" if self._without_body else answer.body))
        self._loop.add_writer(self._socket.fileno(), self._write)
        self._write()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # its client has left
            self.close()
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._linger()

    def _linger(self) -> None:
        """Half close, and read until the client has closed as well: it has the answer then."""
        self._loop.remove_writer(self._socket.fileno())
        self._until = min(self._until, time.monotonic() + LINGER_SECONDS)
        self._reads = 0
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.close()
            return
        self._loop.add_reader(self._socket.fileno(), self._discard)

    def _discard(self) -> None:
        try:
            left = self._socket.recv(LINGER_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            left = b""
        self._reads += 1
        if not left or self._reads >= LINGER_READS:
            self.close()


class ShortHttpServer:
    """Listens from construction on, until `close`; IPv4 or IPv6."""

    def __init__(self, host: str, port: int, respond: Respond):
        """Raises OSError if the port is taken."""
        self._listener = listen(host, port, BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._respond = respond
        self._open: OpenConnections[Connection] = OpenConnections(MAX_CONNECTIONS)
        self.loop = asyncio.SelectorEventLoop()
        self._tasks = [self.loop.create_task(one) for one in (self._accept(), self._close_overdue())]
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed already
            for task in self._tasks:
                self.loop.call_soon_threadsafe(task.cancel)
        self._thread.join(5.0)

    def _run(self) -> None:
        self.loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        for connection in list(self._open):
            connection.close()
        self._listener.close()
        self.loop.close()

    async def _accept(self) -> None:
        pace = AcceptPace()
        while True:
            try:
                accepted, _ = await self.loop.sock_accept(self._listener)
            except OSError as error:
                log.debug("the port of probes and metrics does not accept: %s", error)
                await asyncio.sleep(RETRY_SECONDS)
                continue
            try:
                self._begin(accepted)
            except OSError as error:  # the system has no room for one more descriptor to wait for
                log.debug("a connection to the port of probes and metrics was not begun: %s", error)
                accepted.close()
            pause = pace.pause_seconds()
            if pause is not None:
                await asyncio.sleep(pause)

    def _begin(self, accepted: socket.socket) -> None:
        connection = Connection(self.loop, accepted, self._respond, self._open.discard)
        excess = self._open.add(connection, network_of(accepted))
        if excess is not None:
            excess.close()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            now = time.monotonic()
            for connection in [one for one in self._open if one.overdue(now)]:
                connection.close()
