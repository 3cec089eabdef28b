"""Accepts HTTP connections up to a limit. At the limit the connection that has been idle the longest makes room.

    accepted ──head──► working ──answer──► resting        accepted and resting ones are idle
                          ▲──────head─────────┘

Counted from `accept` on, before any TLS handshake: a limit that counts only greeted connections leaves the descriptors
open to whoever does not greet. A newcomer is refused only if every connection works on a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)
ACCEPTS_PER_TURN = 16  # of the event loop: a flood of connections must not hold up streams
REFUSALS = 64  # connections beyond the limit that are told so; more are closed without a word
PAUSE_SECONDS = 0.1  # before the next try, when the process has no descriptor left
BACKLOG = 1024


class Place:
    """One open connection's place."""

    def __init__(self, listener: Listener, sock: socket.socket):
        self._listener = listener
        self.socket = sock
        self.refused = False  # all others work, and the limit is reached

    def working(self) -> None:
        """A request's head is complete."""
        self._listener.move(self, self._listener.busy)

    def resting(self) -> None:
        """Its answer is complete."""
        self._listener.move(self, self._listener.answered)

    def leave(self) -> None:
        self._listener.leave(self)


class Listener:
    """What uvicorn calls a server: it is closed with `close` and `wait_closed`."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[Place], asyncio.Protocol],
        limit: int,
        context: ssl.SSLContext | None,
        handshake_seconds: float,
    ):
        self._sock = sock
        self._make = make
        self._limit = limit
        self._handshake: dict[str, Any] = (
            {"ssl": context, "ssl_handshake_timeout": handshake_seconds} if context is not None else {}
        )
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        # The oldest first
        self.accepted: OrderedDict[Place, None] = OrderedDict()
        self.answered: OrderedDict[Place, None] = OrderedDict()
        self.busy: OrderedDict[Place, None] = OrderedDict()
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._listen()

    def __len__(self) -> int:
        return len(self.accepted) + len(self.answered) + len(self.busy)

    def move(self, place: Place, to: OrderedDict[Place, None]) -> None:
        if self._forget(place):
            to[place] = None

    def leave(self, place: Place) -> None:
        self._forget(place)

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        with contextlib.suppress(ValueError):  # closed already
            self._loop.remove_reader(self._sock)
        self._sock.close()

    async def wait_closed(self) -> None:
        pass

    # --- accepting -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory is left
                log.warning("a connection could not be accepted: %s; an idle one is closed", error)
                self._make_room()
                self._loop.remove_reader(self._sock)
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._listen)
                return
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        place = Place(self, sock)
        if len(self) >= self._limit and not self._make_room():
            if len(self) >= self._limit + REFUSALS:
                sock.close()
                return
            place.refused = True
        self.accepted[place] = None
        sock.setblocking(False)
        task = self._loop.create_task(self._connect(place))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _connect(self, place: Place) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make(place), place.socket, **self._handshake
            )
        except OSError:  # ssl.SSLError and TimeoutError are
            place.leave()
            place.socket.close()

    def _make_room(self) -> bool:
        """End the oldest idle connection, if there is one: first those that have asked for nothing yet."""
        for idle in (self.accepted, self.answered):
            if idle:
                place, _ = idle.popitem(last=False)
                # Its transport reads the end of the stream and closes; during a handshake too.
                with contextlib.suppress(OSError):  # it has just ended by itself: that made room too
                    place.socket.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _forget(self, place: Place) -> bool:
        for places in (self.accepted, self.answered, self.busy):
            if place in places:
                del places[place]
                return True
        return False
