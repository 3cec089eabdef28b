"""How much one turn of the event loop may begin."""

from __future__ import annotations

import time
from collections.abc import Callable


class TurnAllowance:
    """Items per turn of the event loop: `least`, or one for each `seconds` that the loop computed in the turn before, if
    that is more. On a busy loop, whose turns are long, `least` per turn would starve what waits; with one item per
    `seconds`, items that take a fraction of `seconds` lengthen a turn by that fraction, however long turns are.

    The time is the processor time of the loop's thread. By the clock, turns are also long where other processes want the
    processor, and more items would make them longer still.
    """

    def __init__(self, seconds: float, least: int = 1, clock: Callable[[], float] = time.thread_time) -> None:
        self._seconds = seconds
        self._least = least
        self._clock = clock
        self._turned = 0.0  # processor time when the present turn began

    def begin_turn(self) -> None:
        """Measure from now on: nothing was waiting before."""
        self._turned = self._clock()

    def next_turn(self) -> int:
        """End a turn and begin the next; returns the items of the next."""
        before, self._turned = self._turned, self._clock()
        return max(self._least, int((self._turned - before) / self._seconds))
