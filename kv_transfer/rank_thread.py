"""The thread of a rank's hand-off endpoint, and the messages that wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


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
