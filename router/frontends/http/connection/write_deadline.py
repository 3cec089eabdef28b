"""The deadline by which a client must read what it was sent.

If an answer is not read, uvicorn stops sending, tokens queue up to a bound, and the decode worker pauses. If the client
then reads less than `MIN_READ_BYTES` in `write_seconds`, the connection is aborted, which cancels the request. So is a
closed connection whose last bytes are not read.
"""

from __future__ import annotations

import asyncio
import logging

from cluster.process.standstill import standstill
from router.frontends.http.connection.acknowledged import acknowledged_bytes

log = logging.getLogger(__name__)
# Least to be read of an answer in `write_seconds`: slower clients would hold a connection and its answer for hours.
MIN_READ_BYTES = 1 << 16


class WriteDeadline:
    """The write deadline of one connection. It is checked several times, first after the client's kernel has filled its
    buffer."""

    def __init__(self, transport: asyncio.Transport, client: tuple[str, int] | None, write_seconds: float):
        self._transport = transport
        self._client = client
        self._seconds = write_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._acknowledged = 0  # bytes that the client had received when the deadline was set
        self._deadline = 0.0

    def start(self) -> None:
        if self._timer is None:
            self._set()
            self._check_later()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._acknowledged = acknowledged_bytes(self._transport)
        self._deadline = self._loop.time() + self._seconds

    def _check_later(self) -> None:
        self._due = self._loop.time() + self._seconds / 4
        self._timer = self._loop.call_later(self._seconds / 4, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        self._deadline += standstill(self._due, now)  # nothing was written meanwhile
        if acknowledged_bytes(self._transport) - self._acknowledged >= MIN_READ_BYTES:
            self._set()
        elif now >= self._deadline:
            self._timer = None
            text = "client %s read less than %d bytes in %g s (write_seconds); its connection is aborted"
            log.info(text, self._client, MIN_READ_BYTES, self._seconds)
            self._transport.abort()
            return
        self._check_later()
