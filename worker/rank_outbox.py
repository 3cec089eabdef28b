"""What a leader has to say to one of its ranks, written by a thread of its own: a rank that does not read holds up
neither the event loop nor the timers that notice it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Hand-offs bound what is under way (parts by landing slots); a rank that lets so much pile up has failed.
MAX_MESSAGES = 8192


class RankOutbox:
    """`put` from any thread. Messages go out in order; what is left when the rank is gone is dropped."""

    def __init__(
        self,
        pipe: Connection,
        name: str,
        max_messages: int = MAX_MESSAGES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pipe = pipe
        self._max_messages = max_messages
        self._clock = clock
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writing_since: float | None = None
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Any) -> bool:
        """False: the message was not taken, because too many wait."""
        if self._waiting.qsize() >= self._max_messages:
            return False
        self._waiting.put(message)
        return True

    def stuck_seconds(self) -> float:
        """How long the write in progress has taken; 0 between writes."""
        since = self._writing_since
        return self._clock() - since if since is not None else 0.0

    def _write(self) -> None:
        while True:
            message = self._waiting.get()
            self._writing_since = self._clock()
            try:
                self._pipe.send(message)
            except (OSError, ValueError):  # the rank is gone, or the pipe is closed: who listens notices too
                self._writing_since = None
                return
            self._writing_since = None
