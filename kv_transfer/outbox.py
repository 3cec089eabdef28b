"""The queue of messages to send on a control stream: in order, bounded, and several together.

Each message costs both ends together a tenth of a millisecond of processor time, and grants and results come in
bursts. A delayable message therefore waits for the next urgent one, for MAX_DELAYED_MESSAGES, or for MAX_DELAY_SECONDS.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from wire import handoff_pb2

MAX_QUEUED_MESSAGES = 4096
MAX_TOGETHER = 64  # that travel with the first one
MAX_TOGETHER_BYTES = 64 << 10  # the bytes of parts (gRPC transport) travel alone
MAX_DELAYED_MESSAGES = 4  # two parts' results and the grants that follow from them
MAX_DELAY_SECONDS = 0.002

M = TypeVar("M", handoff_pb2.PrefillToDecode, handoff_pb2.DecodeToPrefill)


class Outbox(Generic[M]):
    """One event loop, one reader."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._messages: deque[M] = deque()
        self._delayed = 0  # number of queued delayable messages
        self.due = False  # whether messages may be sent now
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, message: M, *, delayable: bool = False) -> None:
        """Queue a message; after `end` it is dropped. Raises asyncio.QueueFull."""
        if self._ended:
            return
        if len(self._messages) >= MAX_QUEUED_MESSAGES:
            raise asyncio.QueueFull
        self._messages.append(message)
        self._delayed += delayable
        if not delayable or self._delayed >= MAX_DELAYED_MESSAGES:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_later(MAX_DELAY_SECONDS, self._send)

    def end(self) -> None:
        """Send what is queued, and nothing after it."""
        self._ended = True
        self._send()

    def _send(self) -> None:
        self.due = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> M | None:
        """The next messages as one, or None at the end."""
        while not self.due:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._messages:
            return None
        return self._take()

    def _take(self) -> M:
        first = self._messages.popleft()
        size = first.ByteSize()
        while size < MAX_TOGETHER_BYTES and len(first.more) < MAX_TOGETHER and self._messages:
            message = self._messages.popleft()
            size += message.ByteSize()
            first.more.append(message)
        if not self._messages and not self._ended:
            self.due = False
            self._delayed = 0
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return first
