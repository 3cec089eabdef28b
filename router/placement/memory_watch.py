"""Redis's memory use, as it was read last."""

from __future__ import annotations

import logging
from collections.abc import Callable

import redis
from redis.asyncio.client import Pipeline

from cluster.redis.memory import PRESSED, RedisMemory, warn_of_policy
from router.placement.redis_poll import Answers

log = logging.getLogger(__name__)


class MemoryWatch:
    def __init__(self, any_hash: str, *, index: bool = False):
        """`any_hash`: a hash key of the namespace for a write without effect, which a replica refuses. `index`: of the
        prefix index's own Redis."""
        self._any_hash = any_hash
        self._index = index
        self._refused = False
        self.memory = RedisMemory()

    def ask(self, pipeline: Pipeline) -> Callable[[Answers], None]:
        pipeline.hdel(self._any_hash, "")
        pipeline.info("memory")
        return self._take

    def refused(self, error: redis.RedisError) -> None:
        if isinstance(error, redis.exceptions.NoPermissionError) and not self._refused:
            log.warning("Redis's memory use can't be read; give this router's Redis user +info: %s", error)
            self._refused = True

    def _take(self, answers: Answers) -> None:
        self._refused = False
        now = RedisMemory.of(answers[1])
        before, self.memory = self.memory, now
        warn_of_policy(before, now, index=self._index)
        if now.pressed and not before.pressed:
            log.warning(
                "Redis's memory is %.0f %% used; above %.0f %% placements are not predicted and index entries live "
                "shorter: raise maxmemory",
                *(100 * now.share, 100 * PRESSED),
            )
        elif before.pressed and not now.pressed:
            log.info("Redis's memory is %.0f %% used: placements are predicted again", 100 * now.share)
