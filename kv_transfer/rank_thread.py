"""The thread of a rank's hand-off endpoint, the messages that wait for it, and how often it polls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")
MIN_SECONDS = 30e-6
MAX_SECONDS = 0.02
PAUSE_DIVISOR = 64


def pause_between(quiet_seconds: float, shortest: float, longest: float, divisor: float) -> float:
    """Pause between two polls, `quiet_seconds` after the last progress."""
    return min(longest, max(shortest, quiet_seconds / divisor))


class PollPace:
    """How often pending writes are polled: at once after progress, then at growing intervals.

    Over TCP a poll also moves the bytes, so the pause grows only in proportion to the time without progress: the end of
    a write that takes T is noticed after at most T / PAUSE_DIVISOR more. A write to a stopped peer, which may stay pending
    for ever, costs one poll every MAX_SECONDS.
    """

    def __init__(self, now: float):
        self._since = now  # time of the last progress

    def progressed(self, now: float) -> None:
        self._since = now

    def pause(self, now: float) -> float:
        return pause_between(now - self._since, MIN_SECONDS, MAX_SECONDS, PAUSE_DIVISOR)


class RankThread(Generic[M]):
    def __init__(self, name: str, run: Callable[[], None]):
        self.closing = False
        self._messages: deque[M] = deque()
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: M) -> None:
        with self._wake:
            self._messages.append(message)
            self._wake.notify()

    def notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def close(self) -> None:
        """Tell the thread to end, and wait for it, for 5 s at most."""
        self.closing = True
        self.notify()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    # --- on the thread itself ------------------------------------------------------------------------------

    def next(self, *kinds: type[M]) -> M | None:
        """Remove and return the first message; with `kinds`, only if it is of one of them."""
        if not self._messages or (kinds and not isinstance(self._messages[0], kinds)):
            return None
        return self._messages.popleft()

    def wait(self, seconds: float, ready: Callable[[], bool] = lambda: False) -> None:
        """Wait for a message, `notify` or `close`; return at once if one is there, or if `ready()`."""
        with self._wake:
            if not (self._messages or self.closing or ready()):
                self._wake.wait(seconds)
