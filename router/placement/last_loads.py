"""What all routers had placed when Redis last answered, for placement while it does not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import redis
import redis.asyncio

from cluster.membership.facts import group_id
from cluster.membership.types import WorkerInfo
from cluster.periodic import Periodic
from cluster.redis.failover import disconnect_after_failover_async
from router.placement.charges import Charges
from router.placement.eligibility import MAX_LISTED, Eligibility
from router.placement.keys import PlacementKeys

log = logging.getLogger(__name__)
READ_SECONDS = 1.0
READ_LEAST = 64  # workers of a role in a large fleet: those with the least load
READ_GROUPS = 4  # KV groups of a large fleet
VALID_SECONDS = 60.0  # later most of what was placed then has ended


class LastLoads:
    """Tokens that wait at prefill workers and that are resident at decode workers, read once a second."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: PlacementKeys,
        charges: Charges,
        eligibility: Callable[[], Eligibility],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`eligibility`: of the latest membership."""
        self._client, self._keys = client, keys
        self._charges, self._eligibility = charges, eligibility
        self._clock = clock
        self._reading = Periodic("reading the workers' load", READ_SECONDS, self.read)
        self._read_at = -VALID_SECONDS
        self._then: dict[str, int] = {}  # by name; what this router had placed is among it
        self._own: dict[str, int] = {}  # what it had placed
        self._fullest = 0

    def start(self) -> None:
        self._reading.start()

    async def close(self) -> None:
        await self._reading.close(2 * READ_SECONDS)

    async def read(self) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                own = dict(self._charges.by_worker)
                found = await self._ask(self._eligibility())
        except (redis.RedisError, TimeoutError, OSError) as error:
            log.debug("the workers' load could not be read: %s", error)
            await disconnect_after_failover_async(self._client, error)
            return
        self._then, self._own, self._read_at = found, own, self._clock()
        self._fullest = max(found.values(), default=0)

    async def _ask(self, eligibility: Eligibility) -> dict[str, int]:
        roles = eligibility.prefill, eligibility.decode
        if max(map(len, roles)) <= MAX_LISTED:
            workers = [worker for role in roles for worker in role]
            if not workers:
                return {}
            fields = [f"{worker.role[0]}:{worker.name}" for worker in workers]
            loads = await self._client.hmget(self._keys.load, fields)
            return {worker.name: int(load or 0) for worker, load in zip(workers, loads, strict=True)}
        pipeline = self._client.pipeline(transaction=False)
        for group in _groups(roles[1]):
            for kind in "pr":
                pipeline.zrange(self._keys.scores(group, kind), 0, READ_LEAST - 1, withscores=True)
        return {name.decode(): int(load) for heads in await pipeline.execute() for name, load in heads}

    @property
    def valid(self) -> bool:
        return self._clock() - self._read_at < VALID_SECONDS

    def of(self, name: str) -> int | None:
        """Then, and what this router has added since. None: the worker had more than those that were read."""
        then = self._then.get(name)
        return None if then is None else self._since(name, then)

    def at_least(self, name: str) -> int:
        """As `of`; of a worker that had more than those that were read, what the fullest of these had."""
        return self._since(name, self._then.get(name, self._fullest))

    def _since(self, name: str, then: int) -> int:
        return max(0, then + self._charges.by_worker.get(name, 0) - self._own.get(name, 0))


def _groups(decode: Sequence[WorkerInfo]) -> list[bytes]:
    groups = dict.fromkeys(group_id(one.model_id, one.page_size, one.layout) for one in decode)
    return list(groups)[:READ_GROUPS]
