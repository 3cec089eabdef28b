"""How soon streams go on after a fault, as docs/reliability.md promises it, and what a test allows on top of that.

`make chaos` and `make cancels` judge by the promised figures alone; they are run on a machine that nobody else uses.
"""

from __future__ import annotations

KILL_SECONDS = 1.5  # a killed process: the longest silence that a Baton client sees
STOP_SECONDS = 6.5  # a stopped process, or a partition
PLACEMENT_BACK_SECONDS = 2.0  # after Redis answers again
RECLAIM_SECONDS = 2.0  # after cancels: nothing is held any more
ROUTER_GONE_SECONDS = 3.0  # after a router's death: nothing is held for its requests any more
BUSY_SECONDS = 5.0  # what a machine with two cores that others use may add to any of them


def allowed(promised_seconds: float) -> float:
    """The bound that a test asserts."""
    return promised_seconds + BUSY_SECONDS
