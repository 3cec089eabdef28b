"""The load of the workers, by all routers, when Redis last answered: for placement while it does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import redis
from redis.asyncio.client import Pipeline

from cluster.config.worker import Role
from cluster.membership.facts import group_id
from cluster.membership.types import WorkerInfo
from router.placement.charges import Charges
from router.placement.eligibility import MAX_LISTED, Eligibility
from router.placement.keys import PlacementKeys
from router.placement.kv_groups import kv_group_of
from router.placement.redis_poll import Answers
from router.placement.types import KvGroup

READ_LEAST = 64  # workers of a role in a large KV group: those with the least load
READ_GROUPS = 4  # large ones
READ_NAMED = 512  # workers of the others, all together
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
        self._seen: Eligibility | None = None
        self._known: tuple[list[WorkerInfo], list[bytes]] = ([], [])  # of it

    def ask(self, pipeline: Pipeline) -> Callable[[Answers], None]:
        own = dict(self._charges.by_worker)
        named, large = self._groups_of(self._eligibility())
        if named:
            pipeline.hmget(self._keys.load, [f"{worker.role[0]}:{worker.name}" for worker in named])
        for group in large:
            for kind in "pr":
                pipeline.zrange(self._keys.scores(group, kind), 0, READ_LEAST - 1, withscores=True)

        def take(answers: Answers) -> None:
            names = [worker.name for worker in named]
            loads = list(zip(names, answers[0] if named else (), strict=True))
            heads = answers[1:] if named else answers
            self._take(own, [*loads, *((name.decode(), load) for head in heads for name, load in head)])

        return take

    def _groups_of(self, eligibility: Eligibility) -> tuple[list[WorkerInfo], list[bytes]]:
        """Workers whose load is read by name, and the KV groups whose sorted sets are read: placements keep the sets of
        large groups only."""
        if self._seen is not eligibility:
            self._seen, self._known = eligibility, _groups(eligibility)
        return self._known

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


def _groups(eligibility: Eligibility) -> tuple[list[WorkerInfo], list[bytes]]:
    by_group: dict[KvGroup, dict[Role, list[WorkerInfo]]] = {}
    for worker in (*eligibility.decode, *eligibility.prefill):
        by_role = by_group.setdefault(kv_group_of(worker), {"prefill": [], "decode": []})
        by_role[worker.role].append(worker)
    named: list[WorkerInfo] = []
    large: list[bytes] = []
    for group, by_role in by_group.items():
        if max(map(len, by_role.values())) > MAX_LISTED:
            large.append(group_id(group.model_id, group.page_size, group.layout))
        else:
            named += [worker for workers in by_role.values() for worker in workers]
    return named[:READ_NAMED], large[:READ_GROUPS]
