"""How often writes under way, and slots that are granted, are looked at: at once again after something has happened, then
ever less often.

Over TCP a look is also what moves the bytes. So the pause grows with the time in which nothing happened: a write that
takes T is known to be over within T / PATIENCE of it, and one to a stopped peer, which may stay pending for ever, costs a
look every MAX_SECONDS.
"""

from __future__ import annotations

MIN_SECONDS = 30e-6
MAX_SECONDS = 0.02
PATIENCE = 64


def pause_between(quiet_seconds: float, shortest: float, longest: float, patience: float) -> float:
    """Between two looks, so long after something has happened."""
    return min(longest, max(shortest, quiet_seconds / patience))


class PollPace:
    def __init__(self, now: float):
        self._since = now  # when something happened last

    def happened(self, now: float) -> None:
        self._since = now

    def pause(self, now: float) -> float:
        return pause_between(now - self._since, MIN_SECONDS, MAX_SECONDS, PATIENCE)
