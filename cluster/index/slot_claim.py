"""A worker's slot in a prefix index that has a Redis of its own.

The registry assigns slots; the worker writes a copy to the index, and renews it. A slot that the index has had before is
not taken again while nodes may name it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import redis

from cluster.index import scripts, slot_keys
from cluster.protocol.times import FORGET_SECONDS
from cluster.redis.memory import always_writes

KEEP_SECONDS = 1.0
_TIMES = int(FORGET_SECONDS * 1000), int((FORGET_SECONDS + scripts.NODE_TTL_SECONDS) * 1000)


class SlotClaim:
    """Every call but `release` raises redis.RedisError."""

    def __init__(self, client: redis.Redis, namespace: str, clock: Callable[[], float] = time.monotonic):
        self._script = client.register_script(always_writes(scripts.claim()))
        self._keys = slot_keys.all_keys(namespace)
        self._mine: tuple[int, str] | None = None  # slot, name
        self._clock = clock
        self._kept = -KEEP_SECONDS

    @property
    def due(self) -> bool:
        """Whether to show a sign of life."""
        return self._mine is not None and self._clock() - self._kept >= KEEP_SECONDS

    def claim(self, slot: int, name: str) -> int | None:
        """Take the slot, in place of the former one. Returns the highest slot that the index knows if it has had this one
        before; None: it is taken."""
        answer = self._call(slot, name, "claim", *(self._mine or ()))
        if answer != b"ok":
            return int(answer)
        self._mine, self._kept = (slot, name), self._clock()
        return None

    def keep(self) -> bool:
        """Show a sign of life, if it is due. False: the index has lost the slot."""
        if self._mine is None or not self.due:
            return True
        self._kept = self._clock()
        return self._call(*self._mine, "keep") == b"ok"

    def release(self) -> None:
        if self._mine is not None:
            with contextlib.suppress(redis.RedisError):
                self._call(*self._mine, "leave")

    def _call(self, slot: int, name: str, what: str, *former: str | int) -> bytes:
        answer = self._script(keys=self._keys, args=[slot, name, what, *_TIMES, *former])
        return answer if isinstance(answer, bytes) else b"%d" % answer
