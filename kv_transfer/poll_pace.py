"""How often writes under way are looked at: at once again after something has happened, then ever less often.

Over TCP a look is also what moves the bytes. So the pause grows with the time in which nothing happened: a write that
takes T is known to be over within T / PATIENCE of it, and one to a stopped peer, which may stay pending for ever, costs a
look every MAX_SECONDS.
"""

from __future__ import annotations

MIN_SECONDS = 30e-6
MAX_SECONDS = 0.02
PATIENCE = 64


class PollPace:
    def __init__(self, now: float):
        self._since = now  # when something happened last

    def happened(self, now: float) -> None:
        self._since = now

    def pause(self, now: float) -> float:
        return min(MAX_SECONDS, max(MIN_SECONDS, (now - self._since) / PATIENCE))
