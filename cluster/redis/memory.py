"""Redis' memory use and eviction policy.

Only index keys have a time to live, so a policy of `volatile-…` evicts the index and nothing else. With `noeviction` a
full index also fails placing, registering and renewing; `allkeys-…` evicts leases, load and quotas.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PRESSED = 0.7  # used/maxmemory above which the index's time to live shrinks
LEAST_SHARE = 1 / 60  # of the index's time to live, at a full Redis
ADVICE = "set maxmemory-policy to volatile-lru"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RedisMemory:
    """Memory figures of INFO. `max_bytes` is 0 if maxmemory is not set."""

    used_bytes: int = 0
    max_bytes: int = 0
    policy: str = ""  # "" = not read yet

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
        """False also if the policy is unknown."""
        return self.policy.startswith("volatile-")

    def shortened(self, ttl_seconds: float) -> float:
        """The time to live for new index entries: `ttl_seconds`, reduced linearly above PRESSED."""
        if not self.pressed:
            return ttl_seconds
        return ttl_seconds * max(LEAST_SHARE, (1.0 - self.share) / (1.0 - PRESSED))


def warn_of_policy(before: RedisMemory, now: RedisMemory) -> None:
    """Log a policy that does not protect control data, once for each change."""
    if now.policy != before.policy and not now.evicts_index_only:
        log.warning(
            "Redis' maxmemory-policy is %s: %s, otherwise a full prefix index fails every other write",
            now.policy,
            ADVICE,
        )
