"""Reads Redis's memory use every second."""

from __future__ import annotations

import asyncio
import logging

import redis
import redis.asyncio

from cluster.periodic import Periodic
from cluster.redis.failover import disconnect_after_failover_async
from cluster.redis.memory import PRESSED, RedisMemory, warn_of_policy

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0


class MemoryWatch:
    """`memory` is the last reading, also while Redis is unreachable."""

    def __init__(self, client: redis.asyncio.Redis, any_hash: str):
        """`any_hash`: a hash key of the namespace for a write without effect, which a replica refuses."""
        self._client = client
        self._any_hash = any_hash
        self._reading = Periodic("reading Redis's memory use", LOOK_SECONDS, self.look)
        self._refused = False
        self.memory = RedisMemory()

    def start(self) -> None:
        self._reading.start()

    async def close(self) -> None:
        await self._reading.close(2 * LOOK_SECONDS)

    async def look(self) -> None:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._client.hdel(self._any_hash, "")
                now = RedisMemory.of(await self._client.info("memory"))
        except redis.exceptions.NoPermissionError as error:
            if not self._refused:
                log.warning(
                    "Redis's memory use can't be read; give this router's Redis user +info: %s", error
                )
            self._refused = True
            return
        except (redis.RedisError, TimeoutError, OSError) as error:
            log.debug("Redis's memory use could not be read: %s", error)
            await disconnect_after_failover_async(self._client, error)
            return
        self._refused = False
        before, self.memory = self.memory, now
        warn_of_policy(before, now)
        if now.pressed != before.pressed:
            log.warning(
                "Redis's memory is %.0f %% used; above %.0f %% placements are not predicted and index entries live "
                "shorter: raise maxmemory",
                *(100 * now.share, 100 * PRESSED),
            )
