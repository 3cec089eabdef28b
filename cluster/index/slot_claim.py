"""A worker's slot in a prefix index that has a Redis of its own.

The registry assigns slots; the worker writes a copy to the index, and renews it. A slot that the index has had before is
not taken again while nodes may name it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable

import redis

from cluster.index import scripts, slot_keys
from cluster.protocol.times import FORGET_SECONDS
from cluster.redis.memory import always_writes

KEEP_SECONDS = 1.0
_TIMES = int(FORGET_SECONDS * 1000), int((FORGET_SECONDS + scripts.NODE_TTL_SECONDS) * 1000)


# Slots are packed in 32 bits. The registry assigns none below the highest that it was given: a wrong one is not passed on.
MAX_SLOT = 1 << 30


def _slot_of(answer: bytes) -> int:
    """The slot that the index names as its highest. Raises redis.InvalidResponse if it is no number up to MAX_SLOT."""
    if not answer.isdigit() or len(answer) > 10 or int(answer) > MAX_SLOT:
        raise redis.InvalidResponse(
            f"the prefix index names {answer[:40]!r} as its highest slot: a key of it was overwritten; empty that Redis"
        )
    return int(answer)


class SlotClaim:
    """Every call but `release` raises redis.RedisError."""

    def __init__(self, client: redis.Redis, namespace: str, clock: Callable[[], float] = time.monotonic):
        self._script = client.register_script(always_writes(scripts.claim()))
        self._keys = slot_keys.all_keys(namespace)
        self._mine: tuple[int, str] | None = None  # slot, owner
        self.highest = 0  # the highest slot that was ever claimed, by the index's last answer
        self._process = secrets.token_hex(4)  # another process may have the same name and epoch
        self._clock = clock
        self._kept = -KEEP_SECONDS

    @property
    def due(self) -> bool:
        """Whether the claim is to be renewed."""
        return self._mine is not None and self._clock() - self._kept >= KEEP_SECONDS

    @property
    def owner(self) -> str:
        """The owner of the claimed slot as the index has it, for reports; "" before the first claim."""
        return self._mine[1] if self._mine is not None else ""

    def claim(self, slot: int, name: str, registration: int) -> bool:
        """Take the slot, in place of the former one. Returns False if the index has had it before. A claim whose answer
        was lost may be repeated. Raises redis.RedisError.

        `registration`: the number of the registration that assigned the slot. An emptied registry may assign the slot
        again; that is another claim, because reports then restart their sequence numbers."""
        owner = f"{name}:{self._process}.{registration}"
        answer = self._call(slot, owner, "claim", *(self._mine or ()))
        if answer != b"ok":
            self.highest = _slot_of(answer)
            return False
        self._mine, self._kept = (slot, owner), self._clock()
        return True

    def keep(self) -> bool:
        """Renew the claim, if that is due. Returns False if the index has lost the slot. Raises redis.RedisError."""
        if self._mine is None or not self.due:
            return True
        self._kept = self._clock()
        answer = self._call(*self._mine, "keep")
        if answer == b"lost":
            return False
        self.highest = _slot_of(answer)
        return True

    def release(self) -> None:
        if self._mine is not None:
            with contextlib.suppress(redis.RedisError):
                self._call(*self._mine, "leave")

    def _call(self, slot: int, owner: str, what: str, *former: str | int) -> bytes:
        answer = self._script(keys=self._keys, args=[slot, owner, what, *_TIMES, *former])
        return answer if isinstance(answer, bytes) else str(answer).encode()
