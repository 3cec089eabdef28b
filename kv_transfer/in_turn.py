"""What a peer asks for and the engine has to answer. An engine's step takes as long as it takes: the peer's stream is
read on meanwhile."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]


class InTurn:
    """Of each transfer one thing at a time, in the order of asking; of different transfers beside each other."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], None], limit: int):
        self._spawn = spawn
        self._limit = limit
        self._queues: dict[bytes, deque[Work]] = {}
        self.pending = 0  # begun, or waiting

    def add(self, transfer_id: bytes, work: Work) -> bool:
        """False: too much is pending, and nothing was added."""
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
                except Exception:  # what comes after it may have to undo it
                    log.exception("a message about %s could not be acted upon", transfer_id.hex())
                finally:
                    self.pending -= 1
        finally:
            self.pending -= len(queue)
            del self._queues[transfer_id]
