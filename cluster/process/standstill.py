"""For how long a process was stopped, by how late a timer of its event loop is."""

from __future__ import annotations

STOPPED_SECONDS = 1.0  # a timer that is later than this: the process was stopped, not only busy


def standstill(due: float, now: float) -> float:
    """Seconds for which the process was stopped until `now`, by a timer that was due at `due` (times of the event loop);
    0 = it was not."""
    late = now - due
    return late if late > STOPPED_SECONDS else 0.0
