"""How often pending writes and granted slots are polled: at once after progress, then at growing intervals.

Over TCP a poll also moves the bytes, so the pause grows only in proportion to the time without progress: the end of a
write that takes T is noticed after at most T / PATIENCE more. A write to a stopped peer, which may stay pending for ever,
costs one poll every MAX_SECONDS.
"""

from __future__ import annotations

MIN_SECONDS = 30e-6
MAX_SECONDS = 0.02
PATIENCE = 64


def pause_between(quiet_seconds: float, shortest: float, longest: float, patience: float) -> float:
    """Pause between two polls, `quiet_seconds` after the last progress."""
    return min(longest, max(shortest, quiet_seconds / patience))


class PollPace:
    def __init__(self, now: float):
        self._since = now  # time of the last progress

    def progressed(self, now: float) -> None:
        self._since = now

    def pause(self, now: float) -> float:
        return pause_between(now - self._since, MIN_SECONDS, MAX_SECONDS, PATIENCE)
