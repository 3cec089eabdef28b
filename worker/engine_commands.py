"""Calls for the engine's thread to run between two steps."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

Command = Callable[..., None]  # called with a DrainingError if it is refused
MAX_PASSES = 64


class CommandQueue:
    """A queue in which commands put `behind` run only when no other one waits, or after MAX_PASSES others.

    Bounded by the requests that the worker admits: every command belongs to one. None = the thread is to end.
    """

    def __init__(self) -> None:
        self._first: deque[Command | None] = deque()
        self._behind: deque[Command | None] = deque()
        self._queued = threading.Semaphore(0)
        self._passes = 0

    def __len__(self) -> int:
        return len(self._first) + len(self._behind)

    def put(self, command: Command | None, *, behind: bool = False) -> None:
        (self._behind if behind else self._first).append(command)
        self._queued.release()

    def get(self, block: bool, seconds: float | None = None) -> Command | None:
        """Raises queue.Empty."""
        if not self._queued.acquire(block, seconds if block else None):
            raise queue.Empty
        if self._behind and (not self._first or self._passes >= MAX_PASSES):
            self._passes = 0
            return self._behind.popleft()
        self._passes += bool(self._behind)
        return self._first.popleft()
