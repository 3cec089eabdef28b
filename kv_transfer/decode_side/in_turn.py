"""Runs the engine's work for a peer's messages in the background, so that reading its stream never waits for a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]


class InTurn:
    """Runs the work of one transfer in the order of arrival, and the work of different transfers concurrently."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], None], limit: int):
        self._spawn = spawn
        self._limit = limit
        self._queues: dict[bytes, deque[Work]] = {}
        self.pending = 0  # running or waiting

    def add(self, transfer_id: bytes, work: Work) -> bool:
        """Queue `work`. Returns False, without queueing it, if `limit` works are pending."""
        if self.pending >= self._limit:
            return False
        self.pending += 1
        queue = self._queues.get(transfer_id)
        if queue is not None:
            queue.append(work)
        else:
            self._queues[transfer_id] = deque([work])
            self._spawn(self._run(transfer_id))
        return True

    async def _run(self, transfer_id: bytes) -> None:
        queue = self._queues[transfer_id]
        try:
            while queue:
                try:
                    await queue.popleft()()
                except Exception:  # later messages still run: one of them may undo this one
                    log.exception("handling a message of hand-off %s failed", transfer_id.hex())
                finally:
                    self.pending -= 1
        finally:
            self.pending -= len(queue)
            del self._queues[transfer_id]
