"""How fast a thread accepts connections at a port that anyone may connect to."""

from __future__ import annotations

import time
from collections.abc import Callable

ACCEPTS_PER_TURN = 16
PAUSE_PER_SECOND = 1.0  # seconds without accepting, for each second of processor time
MAX_PAUSE_SECONDS = 0.05


class AcceptPace:
    """Pauses by which a thread takes about half of a core at most, whatever clients do. Made on that thread."""

    def __init__(self, clock: Callable[[], float] = time.thread_time):
        """`clock`: processor time of the thread, in seconds."""
        self._clock = clock
        self._accepts = 0
        self._paused_at = clock()

    def pause_seconds(self) -> float | None:
        """The pause that is due after an accept, or None within a turn. What connections compute during a pause, on the
        same thread, counts in the next one."""
        self._accepts += 1
        if self._accepts % ACCEPTS_PER_TURN:
            return None
        now = self._clock()
        pause = PAUSE_PER_SECOND * (now - self._paused_at)
        self._paused_at = now
        return min(pause, MAX_PAUSE_SECONDS)
