"""Times at which the parts of a traced hand-off were requested, granted and verified."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

MAX_PARTS = 256  # of one hand-off: a trace does not need thousands


@dataclass
class PartTime:
    """Monotonic seconds; 0 = not yet."""

    target_rank: int
    part: int
    bytes: int
    asked: float
    granted: float = 0.0
    verified: float = 0.0


class PartTimes:
    def __init__(self) -> None:
        self._parts: dict[tuple[int, int, int], PartTime] = {}
        self.unnamed = 0  # beyond MAX_PARTS

    def asked(self, source_rank: int, target_rank: int, part: int, size: int) -> None:
        key = (source_rank, target_rank, part)
        if key in self._parts:  # sent again
            return
        if len(self._parts) >= MAX_PARTS:
            self.unnamed += 1
            return
        self._parts[key] = PartTime(target_rank, part, size, time.monotonic())

    def granted(self, source_rank: int, target_rank: int, part: int) -> None:
        known = self._parts.get((source_rank, target_rank, part))
        if known is not None:
            known.granted = time.monotonic()

    def verified(self, source_rank: int, target_rank: int, part: int) -> None:
        known = self._parts.get((source_rank, target_rank, part))
        if known is not None:
            known.verified = time.monotonic()

    def __iter__(self) -> Iterator[PartTime]:
        return iter(self._parts.values())
