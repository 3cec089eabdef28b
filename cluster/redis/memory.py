"""How full Redis is, and what it evicts when it is.

Where only index keys have a time to live, a policy of `volatile-…` evicts the index and nothing else; with `noeviction` a
full index stops placing, registering and renewing as well, and `allkeys-…` evicts what nobody can make again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRESSED = 0.7  # used/maxmemory from which the index takes less
LEAST_SHARE = 1 / 60  # of the index's time to live, when Redis is full
ADVICE = "set maxmemory-policy to volatile-lru"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RedisMemory:
    """As INFO says it. `max_bytes` 0: no limit of its own."""

    used_bytes: int = 0
    max_bytes: int = 0
    policy: str = ""  # "": not read yet

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> RedisMemory:
        used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
        return cls(used, most, str(info.get("maxmemory_policy", "")))

    @property
    def share(self) -> float:
        return self.used_bytes / self.max_bytes if self.max_bytes else 0.0

    @property
    def pressed(self) -> bool:
        return self.share >= PRESSED

    @property
    def evicts_index_only(self) -> bool:
        """False too where Redis has not said it."""
        return self.policy.startswith("volatile-")

    def shortened(self, ttl_seconds: float) -> float:
        """The time to live of what the index learns now: less, the fuller Redis is."""
        if not self.pressed:
            return ttl_seconds
        return ttl_seconds * max(LEAST_SHARE, (1.0 - self.share) / (1.0 - PRESSED))


def warn_of_policy(before: RedisMemory, now: RedisMemory) -> None:
    """Once, and again when it has changed."""
    if now.policy != before.policy and not now.evicts_index_only:
        log.warning(
            "Redis' maxmemory-policy is %s: %s, or a full index stops everything else", now.policy, ADVICE
        )
