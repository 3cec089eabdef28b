"""A connection that is answered before its client has sent all: it is read on for a while, and then closed.

Closed at once, with unread bytes of the client's, it would be reset, and the client would lose the answer with its reason
(RFC 9112, 9.6). A client that goes on sending has as long as for a body. Its bytes are dropped, at a bounded rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

# A client from which nothing has arrived for this long has ended its request, or its bytes are far apart.
QUIET_SECONDS = 0.5
# Dropped in that time: a client that sends as fast as it can must not fill the event loop.
QUIET_BYTES = 8 << 20


class Flow(Protocol):
    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Linger:
    """Of one connection, from `start` until it calls `close`; call `stop` once the connection is lost."""

    def __init__(self, flow: Flow, most_seconds: float, close: Callable[[], None]):
        self._flow, self._most_seconds, self._close = flow, most_seconds, close
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0  # of the loop's clock
        self._bytes = 0  # that arrived since the timer was set

    def start(self) -> None:
        self.stop()
        self._deadline = asyncio.get_running_loop().time() + self._most_seconds
        self._wait()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def drop(self, size: int) -> None:
        """Count `size` bytes that have arrived."""
        self._bytes += size
        if self._bytes >= QUIET_BYTES:
            self._flow.pause_reading()

    def _wait(self) -> None:
        self._bytes = 0
        self._flow.resume_reading()
        self._timer = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._bytes and asyncio.get_running_loop().time() < self._deadline:
            self._wait()
        else:
            self._close()
