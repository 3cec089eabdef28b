"""A queue of messages to one rank with a thread that writes them: a rank that does not read must not block the event loop
or the timers that detect it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from worker.ranks.pipe import FromRankProcess, RankPipe, ToRankProcess

# Far more than hand-offs have in flight (landing slots bound the parts): a rank with as many unread has failed.
MAX_MESSAGES = 8192


class RankOutbox:
    """Sends messages in order; `put` may be called from any thread. Drops what is left when the rank is gone."""

    def __init__(
        self,
        pipe: RankPipe[ToRankProcess, FromRankProcess],
        name: str,
        max_messages: int = MAX_MESSAGES,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pipe = pipe
        self._max_messages = max_messages
        self._clock = clock
        self._waiting: queue.SimpleQueue[ToRankProcess] = queue.SimpleQueue()
        self._writing_since: float | None = None
        self._thread = threading.Thread(target=self._write, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: ToRankProcess) -> bool:
        """Queue a message; returns False, without queueing it, if too many wait."""
        if self._waiting.qsize() >= self._max_messages:
            return False
        self._waiting.put(message)
        return True

    def stuck_seconds(self) -> float:
        """Seconds since the write in progress began; 0 between writes."""
        since = self._writing_since
        return self._clock() - since if since is not None else 0.0

    def _write(self) -> None:
        while True:
            message = self._waiting.get()
            self._writing_since = self._clock()
            try:
                self._pipe.send(message)
            except (OSError, ValueError):  # the rank is gone or the pipe closed: its reader reports it
                self._writing_since = None
                return
            self._writing_since = None
