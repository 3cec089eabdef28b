"""Messages of one control stream on their way out: in order, bounded, and together where several wait.

A message costs both ends of a stream far more than what it says, and grants and results come in bursts.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from wire import handoff_pb2

MAX_QUEUED_MESSAGES = 4096
MAX_TOGETHER = 64
MAX_TOGETHER_BYTES = 64 << 10  # the bytes of parts (gRPC transport) travel alone


M = TypeVar("M", handoff_pb2.PrefillToDecode, handoff_pb2.DecodeToPrefill)


class Outbox(Generic[M]):
    def __init__(self) -> None:
        self._queue: asyncio.Queue[M | None] = asyncio.Queue(MAX_QUEUED_MESSAGES)

    def put(self, message: M) -> None:
        """Raises asyncio.QueueFull."""
        self._queue.put_nowait(message)

    def end(self) -> None:
        """Nothing more comes. Raises asyncio.QueueFull."""
        self._queue.put_nowait(None)

    async def get(self) -> M | None:
        """The next messages as one, or None at the end."""
        first = await self._queue.get()
        if first is None:
            return None
        size = first.ByteSize()
        while size < MAX_TOGETHER_BYTES and len(first.more) < MAX_TOGETHER and not self._queue.empty():
            message = self._queue.get_nowait()
            if message is None:
                self._queue.put_nowait(None)
                break
            size += message.ByteSize()
            first.more.append(message)
        return first

    def drop_one(self) -> None:
        """Makes room, where the end must be said."""
        self._queue.get_nowait()
