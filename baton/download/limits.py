"""When a download ends before its time: after too long without progress, or because another file's failed."""

from __future__ import annotations

import threading
import time

from cluster.errors import DeadlineError, UnavailableError

# Less than both in the time that is allowed is no progress: an occasional byte must not prolong a download for ever.
MIB = 1 << 20
PROGRESS_BYTES = MIB
LOWEST_BYTES_PER_SECOND = 16 << 10


class DownloadLimits:
    """Shared by the threads of a download. A model takes as long as its bytes do, at LOWEST_BYTES_PER_SECOND or more on
    average over each `seconds`."""

    def __init__(self, seconds: float):
        """`seconds`: the longest time in which PROGRESS_BYTES, or more by the lowest speed, must be read or checked."""
        self._seconds = seconds
        self._progress_bytes = max(PROGRESS_BYTES, int(LOWEST_BYTES_PER_SECOND * seconds))
        self._lock = threading.Lock()
        self._since_progress = 0
        self._last_progress = time.monotonic()
        self._stopped = threading.Event()
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """The first error that stopped it."""
        return self._failure

    @property
    def left(self) -> float:
        """Seconds until it ends without progress; negative after that."""
        return self._last_progress + self._seconds - time.monotonic()

    def arrived(self, count: int) -> None:
        """Count bytes that were read or checked."""
        with self._lock:
            self._since_progress += count
            if self._since_progress >= self._progress_bytes:
                self._since_progress, self._last_progress = 0, time.monotonic()

    def completed(self) -> None:
        """Count a file that is complete: small ones take a request each, and few bytes."""
        self.arrived(PROGRESS_BYTES)

    def progressed(self) -> None:
        """Count as progress what has no bytes: another process gets on."""
        self.arrived(self._progress_bytes)

    def stop(self, failure: BaseException | None = None) -> None:
        """End every thread at its next look."""
        with self._lock:
            self._failure = self._failure or failure
        self._stopped.set()

    def check(self, failed: str = "") -> None:
        """Raise DeadlineError after the limit, UnavailableError if stopped. `failed`: what failed last, as the end of the
        sentence."""
        if self._stopped.is_set():
            raise UnavailableError("the download was stopped", field="source")
        if self.left < 0:
            raise DeadlineError(
                f"no progress for longer than --seconds allows ({self._seconds:g} s): {self._since_progress / MIB:.1f} of "
                f"at least {self._progress_bytes / MIB:.1f} MiB came; the next run goes on from what is here{failed}",
                field="seconds",
            )

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond a stop."""
        self._stopped.wait(seconds)

    def wait_for_end(self) -> None:
        """Return when it was stopped or has made no progress for too long."""
        while (left := self.left) > 0 and not self._stopped.wait(min(left, threading.TIMEOUT_MAX)):
            pass
