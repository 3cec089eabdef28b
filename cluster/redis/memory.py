"""Redis' memory use and eviction policy, and which writes a full Redis takes.

Only index keys have a time to live, so a policy of `volatile-…` evicts the index and nothing else. With `noeviction` the
index is not written until its entries expire; `allkeys-…` evicts leases, load and quotas.

A full Redis refuses a command that may need memory, in a script only if it is the script's first write. Scripts that
serving depends on begin with a write that frees memory, `always_writes`; index reports begin with one that needs memory.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import redis

PRESSED = 0.7  # used/maxmemory above which the index's time to live shrinks
MIN_SHARE = 1 / 60  # of the index's time to live, at a full Redis
ADVICE = "set maxmemory-policy to volatile-lru"
# Has no effect; of a key that is no hash, not even an error.
_FREES = "if KEYS[1] then redis.pcall('HDEL', KEYS[1], '') end "
# The last form: redis-py strips the code where it knows it.
_FULL = re.compile(r"^OOM |: -OOM |^command not allowed when used memory")
log = logging.getLogger(__name__)


def always_writes(script: str) -> str:
    """The script, so that a full Redis runs it too. Its first key should be a hash."""
    return _FREES + script


def says_full(error: redis.RedisError) -> bool:
    """Whether Redis refused a write because its memory is used up."""
    return bool(_FULL.search(str(error)))


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
    def when_full(self) -> str:
        """The consequence of a full Redis whose policy does not evict the index alone, as the end of a sentence."""
        if self.policy.startswith("allkeys-"):
            return "evicts leases, load and quotas too"
        return "takes no new entries of the prefix index"

    @property
    def when_index_full(self) -> str:
        """The same of a Redis with the prefix index alone."""
        if self.policy.startswith("allkeys-"):
            return "evicts the slots of workers too, and these report their whole caches again"
        return self.when_full

    @property
    def evicts_index_only(self) -> bool:
        """False also if the policy is unknown."""
        return self.policy.startswith("volatile-")

    def shortened(self, ttl_seconds: float) -> float:
        """The time to live for new index entries: `ttl_seconds`, reduced linearly above PRESSED."""
        if not self.pressed:
            return ttl_seconds
        return ttl_seconds * max(MIN_SHARE, (1.0 - self.share) / (1.0 - PRESSED))


def warn_of_policy(before: RedisMemory, now: RedisMemory, *, index: bool = False) -> None:
    """Log a policy that does not protect control data, once for each change. `index`: of the prefix index's own Redis."""
    if now.policy != before.policy and not now.evicts_index_only:
        whose = "The maxmemory-policy of the prefix index's Redis" if index else "Redis' maxmemory-policy"
        log.warning(
            "%s is %s: %s, otherwise a full Redis %s",
            whose,
            now.policy,
            ADVICE,
            now.when_index_full if index else now.when_full,
        )
