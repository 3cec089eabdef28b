"""Transfer ids of ended attempts, kept as long as a late message about them may come."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class EndedAttempts:
    """A bounded set with a lifetime: `seconds` is the longest admission deadline."""

    def __init__(
        self, seconds: float = 120.0, max_entries: int = 65536, clock: Callable[[], float] = time.monotonic
    ):
        self._seconds = seconds
        self._max_entries = max_entries
        self._clock = clock
        self._ended: OrderedDict[bytes, float] = OrderedDict()

    def add(self, transfer_id: bytes) -> None:
        self._ended[transfer_id] = self._clock() + self._seconds
        self._ended.move_to_end(transfer_id)
        self._drop_old()

    def __contains__(self, transfer_id: bytes) -> bool:
        self._drop_old()
        return transfer_id in self._ended

    def _drop_old(self) -> None:
        now = self._clock()
        while self._ended:
            expires = next(iter(self._ended.values()))
            if expires > now and len(self._ended) <= self._max_entries:
                return
            self._ended.popitem(last=False)
