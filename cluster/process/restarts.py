"""When a process that has ended is started again: after growing pauses, until it has ended too often in a row."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.2
MAX_PAUSE_SECONDS = 10.0
SHORT_LIFE_SECONDS = 10.0
MAX_SHORT_LIVES = 8


class Restarts:
    """When one process is started again."""

    def __init__(self) -> None:
        self._short_lives = 0

    def pause_after(self, life_seconds: float, *, served: bool) -> float | None:
        """Seconds until the next start; None: it has ended MAX_SHORT_LIVES times in a row, within SHORT_LIFE_SECONDS or
        before it served."""
        short = life_seconds < SHORT_LIFE_SECONDS or not served
        self._short_lives = self._short_lives + 1 if short else 0
        if self._short_lives >= MAX_SHORT_LIVES:
            return None
        return min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * (1 << max(0, self._short_lives - 1)))

    def pause_after_failed_start(self) -> float | None:
        """The same where it could not be started at all."""
        self._short_lives += 1
        return None if self._short_lives >= MAX_SHORT_LIVES else MAX_PAUSE_SECONDS
