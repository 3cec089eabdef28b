"""HTTP for probes and scrapes, at a port without a key: one short request per connection, on one thread of its own.

    accepted ──head──► answered by `respond` ──► sent ──► closed

A connection has HEAD_SECONDS for its head and CONNECTION_SECONDS in all. Where too many are open, the oldest of the
address with the most is closed. The thread takes about half of a core at most, whatever clients do.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.open_connections import OpenConnections
from cluster.sockets import listen, network_of

log = logging.getLogger(__name__)
CONNECTION_SECONDS = 10.0  # Prometheus's default scrape timeout
HEAD_SECONDS = 2.0
MAX_CONNECTIONS = 64
BACKLOG = 1024
HEAD_BYTES = 16 << 10
HEAD_READS = 32  # each wakes the thread, for one byte as for all
ACCEPTS_PER_TURN = 16
PAUSE_PER_SECOND = 1.0  # seconds without accepting, for each second of processor time
MAX_PAUSE_SECONDS = 0.05
RETRY_SECONDS = 0.1  # after an accept that failed: no descriptor is free
LOOK_SECONDS = 0.25  # between two checks for connections over their time


@dataclass(frozen=True)
class Request:
    path: str  # without slashes at its ends, and without a query
    accept: str  # the `Accept` headers


@dataclass(frozen=True)
class Answer:
    status: str
    content_type: str
    body: bytes


BAD_REQUEST = Answer("400 Bad Request", "text/plain", b"not an HTTP request, or a head that is too long\n")
FAILED = Answer("500 Internal Server Error", "text/plain", b"the request failed; the log has the reason\n")


def parse(head: bytes) -> Request | None:
    """The request of a head without its last empty line; None: it is none."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers = (line.partition(":") for line in lines)
    accept = [value.strip() for name, _, value in headers if name.lower() == "accept"]
    return Request(words[1].partition("?")[0].strip("/"), ",".join(accept))


Respond = Callable[[Request, "Exchange"], None]


class Exchange:
    """One connection: its request, which goes to `respond`, and the answer, which `send` is called with, at once or later.
    On the server's thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        accepted: socket.socket,
        respond: Respond,
        closed: Callable[[Exchange], None],
    ):
        self._loop = loop
        self._socket = accepted
        self._respond = respond
        self._closed = closed
        self._since = time.monotonic()
        self._head = b""
        self._reads = 0
        self._is_read = False
        self._unsent = memoryview(b"")
        loop.add_reader(accepted.fileno(), self._read)

    def overdue(self, now: float) -> bool:
        return now - self._since > (CONNECTION_SECONDS if self._is_read else HEAD_SECONDS)

    def close(self) -> None:
        """Without effect if it is closed."""
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
        self._is_read = True
        if request is None:
            self.send(BAD_REQUEST)
            return
        try:
            self._respond(request, self)
        except Exception:  # RuntimeError among them: the system has no thread left
            log.exception("a request to the port of probes and metrics failed")
            self.send(FAILED)

    def send(self, answer: Answer) -> None:
        """Without effect if the connection is closed."""
        if self._socket.fileno() < 0:
            return
        head = (
            f"HTTP/1.0 {answer.status}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        self._unsent = memoryview(head.encode() + answer.body)
        self._loop.add_writer(self._socket.fileno(), self._write)
        self._write()

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)  # its client has left
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self.close()


class ShortHttpServer:
    """Listens from construction on, until `close`; IPv4 or IPv6."""

    def __init__(self, host: str, port: int, respond: Respond):
        """Raises OSError if the port is taken."""
        self._listener = listen(host, port, BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._respond = respond
        self._open: OpenConnections[Exchange] = OpenConnections(MAX_CONNECTIONS)
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
        spent = time.thread_time()
        for accepts in itertools.count(1):
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
            if not accepts % ACCEPTS_PER_TURN:
                pause = PAUSE_PER_SECOND * (time.thread_time() - spent)
                spent = time.thread_time()  # what connections compute meanwhile counts in the next pause
                await asyncio.sleep(min(pause, MAX_PAUSE_SECONDS))

    def _begin(self, accepted: socket.socket) -> None:
        connection = Exchange(self.loop, accepted, self._respond, self._open.discard)
        excess = self._open.add(connection, network_of(accepted))
        if excess is not None:
            excess.close()

    async def _close_overdue(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for connection in [one for one in self._open if one.overdue(now)]:
                connection.close()
