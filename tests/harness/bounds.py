"""Recovery bounds promised in docs/reliability.md, and the allowance that tests add to them.

`make chaos` and `make cancels` use the promised bounds alone; they need a machine without other load.
"""

from __future__ import annotations

KILL_SECONDS = 1.5  # a killed process: the longest silence that a Baton client sees
STOP_SECONDS = 6.5  # a stopped process, or a partition
REDISPATCH_SECONDS = 1.2  # from the reset of a link that stays cut until its attempts are dispatched again
PLACEMENT_BACK_SECONDS = 2.0  # after Redis answers again
RECLAIM_SECONDS = 2.0  # from a cancel until nothing is held
ROUTER_GONE_SECONDS = 3.0  # from a router's death until nothing is held for its requests
BUSY_SECONDS = 5.0  # allowance for a busy machine with two cores


def allowed(promised_seconds: float) -> float:
    """The promised bound plus the allowance for a busy machine."""
    return promised_seconds + BUSY_SECONDS
