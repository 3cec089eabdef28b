"""Reads the registry again and again from a thread, over one connection, without what it costs to read all each time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

import redis

from cluster.membership import keys, scripts
from cluster.membership.reader import WHOLE_SECONDS, decode, with_leases
from cluster.membership.types import WorkerInfo
from cluster.protocol.times import FORGET_SECONDS, LEASE_SUSPECT_SECONDS, REGISTER_AGAIN_SECONDS
from cluster.redis.connect import connect
from cluster.redis.failover import disconnect_after_failover


class _Repeated:
    """Every call but `close` raises redis.RedisError."""

    def __init__(self, redis_url: str, namespace: str, script: str, clock: Callable[[], float]):
        self._client = connect(redis_url)
        self._script = self._client.register_script(script)
        self._keys = keys.registry(namespace)
        self._clock = clock

    def _ask(self, *arguments: str | bytes | int) -> Any:
        try:
            return self._script(keys=self._keys, args=[*arguments])
        except redis.RedisError as error:
            disconnect_after_failover(self._client, error)
            raise

    def close(self) -> None:
        self._client.close()


class NamedWorkers(_Repeated):
    """Some workers, whatever the size of the fleet."""

    def __init__(self, redis_url: str, namespace: str, clock: Callable[[], float] = time.monotonic):
        super().__init__(redis_url, namespace, scripts.NAMED, clock)
        self._slots, self._answered = 0, True  # the last slot assigned, as in Members
        self._back_since = -math.inf

    def read(self, worker_ids: Collection[str]) -> list[WorkerInfo]:
        """Those of them that are registered now."""
        answered, self._answered = self._answered, False
        answer = self._ask(*worker_ids)
        if not answered or int(answer[1]) < self._slots:
            self._back_since = self._clock()
        self._slots, self._answered = int(answer[1]), True
        return decode(answer)

    @property
    def may_lack_some(self) -> bool:
        """Redis was away or emptied, and workers have not had the time to register again."""
        return self._clock() - self._back_since <= REGISTER_AGAIN_SECONDS


class AllWorkers(_Repeated):
    """All workers, of which only the leases are read while the registry's generation stays."""

    def __init__(self, redis_url: str, namespace: str, clock: Callable[[], float] = time.monotonic):
        super().__init__(redis_url, namespace, scripts.LOOK, clock)
        self._generation: bytes | str = ""
        self._workers: list[WorkerInfo] = []
        self._read_at = -math.inf

    def read(self) -> list[WorkerInfo]:
        """Their statuses may be WHOLE_SECONDS old."""
        now = self._clock()
        known = self._generation if now - self._read_at <= WHOLE_SECONDS else ""
        overdue_ms = int(LEASE_SUSPECT_SECONDS * 1000)
        generation, everything, *overdue = self._ask(int(FORGET_SECONDS * 1000), known, overdue_ms)
        if not everything:
            return with_leases(self._workers, *overdue)
        self._workers, self._generation, self._read_at = decode(everything), generation, now
        return self._workers
