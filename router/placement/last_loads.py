"""The load of the workers, by all routers, when Redis last answered: for placement while it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import redis
from redis.asyncio.client import Pipeline

from cluster.membership.facts import group_id
from cluster.membership.types import WorkerInfo
from router.placement.charges import Charges
from router.placement.eligibility import MAX_LISTED, Eligibility
from router.placement.keys import PlacementKeys
from router.placement.redis_poll import Answers

READ_LEAST = 64  # workers of a role in a large fleet: those with the least load
READ_GROUPS = 4  # KV groups of a large fleet
VALID_SECONDS = 60.0  # later most of what was placed then has ended


class LastLoads:
    """Load by worker: tokens that wait at a prefill worker, tokens that are resident at a decode worker."""

    def __init__(
        self,
        keys: PlacementKeys,
        charges: Charges,
        eligibility: Callable[[], Eligibility],
        clock: Callable[[], float] = time.monotonic,
    ):
        """`eligibility`: of the latest membership."""
        self._keys = keys
        self._charges, self._eligibility = charges, eligibility
        self._clock = clock
        self._read_at = -VALID_SECONDS
        self._then: dict[str, int] = {}  # tokens by name, what this router had placed included
        self._own: Mapping[str, int] = {}  # tokens by name that this router had placed
        self._fullest = 0  # the largest load in `_then`

    def ask(self, pipeline: Pipeline) -> Callable[[Answers], None]:
        own, eligibility = dict(self._charges.by_worker), self._eligibility()
        roles = eligibility.prefill, eligibility.decode
        if max(map(len, roles)) <= MAX_LISTED:
            workers = [worker for role in roles for worker in role]
            if workers:
                pipeline.hmget(self._keys.load, [f"{worker.role[0]}:{worker.name}" for worker in workers])
            names = [worker.name for worker in workers]
            return lambda answers: self._take(own, zip(names, *answers, strict=True))
        for group in _groups(roles[1]):
            for kind in "pr":
                pipeline.zrange(self._keys.scores(group, kind), 0, READ_LEAST - 1, withscores=True)
        return lambda answers: self._take(
            own, ((name.decode(), load) for heads in answers for name, load in heads)
        )

    def refused(self, error: redis.RedisError) -> None:
        """The loads that were read before stay in use."""

    def _take(self, own: Mapping[str, int], loads: Iterable[tuple[str, Any]]) -> None:
        self._then = {name: int(load or 0) for name, load in loads}
        self._own, self._read_at = own, self._clock()
        self._fullest = max(self._then.values(), default=0)

    @property
    def valid(self) -> bool:
        return self._clock() - self._read_at < VALID_SECONDS

    def of(self, name: str) -> int | None:
        """The load that was read, and what this router has added since; None for a worker that was not among those with
        the least load."""
        then = self._then.get(name)
        return None if then is None else self._since(name, then)

    def at_least(self, name: str) -> int:
        """As `of`; where that is None, a lower bound: the largest load that was read, and what this router has added."""
        return self._since(name, self._then.get(name, self._fullest))

    def _since(self, name: str, then: int) -> int:
        return max(0, then + self._charges.by_worker.get(name, 0) - self._own.get(name, 0))


def _groups(decode: Sequence[WorkerInfo]) -> list[bytes]:
    groups = dict.fromkeys(group_id(one.model_id, one.page_size, one.layout) for one in decode)
    return list(groups)[:READ_GROUPS]
