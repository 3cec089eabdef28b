"""Compares Redis's table of this router's charges with the router's own, a step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from router.placement.charges import Charges

WALK_SECONDS = 2.0  # between two walks


class TableWalk:
    """A walk finds charges that no attempt holds, which are taken off, and charges that Redis lacks, which are added.

    Redis was rolled back, or an answer was lost whose call had been carried out. Each step is one HSCAN of settle.lua, so
    a table of any size holds Redis for a short time only.
    """

    def __init__(self, charges: Charges, clock: Callable[[], float] = time.monotonic):
        self._charges = charges
        self._clock = clock
        self._cursor: bytes | None = None  # None: no walk is under way
        self._expected: set[bytes] = set()
        self._ended = clock()

    @property
    def under_way(self) -> bool:
        return self._cursor is not None

    def next_step(self) -> bytes | str:
        """The cursor of the next step; "": none is due."""
        if self._cursor is None:
            if self._clock() - self._ended < WALK_SECONDS:
                return ""
            self._cursor, self._expected = b"0", self._charges.in_redis()
        return self._cursor

    def abandon(self) -> None:
        """Redis has another table now."""
        self._cursor = None

    def step(self, cursor: bytes, found: Sequence[bytes], in_flight: Collection[bytes]) -> None:
        """`in_flight`: transfer ids of placements whose answers are awaited."""
        if self._cursor is None:
            return
        for transfer_id in found:
            if transfer_id not in self._charges and transfer_id not in in_flight:
                self._charges.withdraw(transfer_id)
        self._expected.difference_update(found)
        self._cursor = cursor
        if cursor == b"0":
            self._cursor, self._ended = None, self._clock()
            self._charges.restore(self._expected)
