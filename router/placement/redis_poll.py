"""Reads Redis's memory use and the workers' load once a second, in one round trip."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import redis
import redis.asyncio
from redis.asyncio.client import Pipeline

from cluster.periodic import Periodic
from cluster.redis.failover import disconnect_after_failover_async

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0
Answers = Sequence[Any]


class Polled(Protocol):
    """Values that are read from Redis. They stay as they are while Redis does not answer."""

    def ask(self, pipeline: Pipeline) -> Callable[[Answers], None]:
        """Add commands to the pipeline; the returned function is called with their answers."""

    def refused(self, error: redis.RedisError) -> None:
        """Called instead where Redis has answered one of the commands with an error."""


class RedisPoll:
    def __init__(self, client: redis.asyncio.Redis, readings: Sequence[Polled]):
        self._client = client
        self._readings = readings
        self._polling = Periodic("reading Redis's memory use and the workers' load", POLL_SECONDS, self.read)

    def start(self) -> None:
        self._polling.start()

    async def close(self) -> None:
        await self._polling.close(2 * POLL_SECONDS)

    async def read(self) -> None:
        """Read all values once. Raises nothing: the next turn tries again."""
        pipeline, parts = self._client.pipeline(transaction=False), []
        for reading in self._readings:
            before = len(pipeline)
            take = reading.ask(pipeline)
            parts.append((reading, take, slice(before, len(pipeline))))
        try:
            async with asyncio.timeout(POLL_SECONDS):
                answers = await pipeline.execute(raise_on_error=False)
        except (redis.RedisError, TimeoutError, OSError) as error:
            await self._failed(error)
            return
        for reading, take, own in parts:
            refusal = next((one for one in answers[own] if isinstance(one, redis.RedisError)), None)
            if refusal is None:
                refusal = _taken(take, answers[own])
            if refusal is not None:
                reading.refused(refusal)
                await self._failed(refusal)

    async def _failed(self, error: Exception) -> None:
        log.debug("Redis's memory use or the workers' load could not be read: %s", error)
        await disconnect_after_failover_async(self._client, error)


def _taken(take: Callable[[Answers], None], answers: Answers) -> redis.RedisError | None:
    """An error where the values are no such ones: others', or of another version."""
    try:
        take(answers)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        return redis.InvalidResponse(f"a value in Redis can't be read: {error}")
    return None
