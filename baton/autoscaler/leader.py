"""Leader election by a lease in Redis: only its holder acts, and only while the lease is certain."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable

import redis

from cluster.redis.connect import connect
from cluster.redis.failover import disconnect_after_failover

log = logging.getLogger(__name__)
# KEYS: lease holder, end of the lease (ms)   ARGV: holder, duration (ms). Returns 1 if the caller holds the lease.
# Neither key has a time to live: a full Redis evicts keys that have one, and then two autoscalers would hold the lease.
_HOLD = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local holder = redis.call('GET', KEYS[1])
local ends = tonumber(redis.call('GET', KEYS[2]) or '0')
if holder and holder ~= ARGV[1] and now < ends then
  -- After a failover the clock may be behind: the lease of a holder that has ended would last for as long.
  local most = now + tonumber(ARGV[2])
  if ends > most then
    redis.call('DEL', KEYS[2])
    redis.call('SET', KEYS[2], most)
  end
  return 0
end
redis.call('DEL', KEYS[2])  -- a full Redis takes writes that need memory after one that needs none
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], now + tonumber(ARGV[2]))
return 1
"""
_GIVE_UP = (
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1], KEYS[2]) end return 0"
)


def lease_keys(namespace: str) -> list[str]:
    """KEYS of both scripts."""
    return [f"{{{namespace}}}:autoscaler", f"{{{namespace}}}:autoscaler-until"]


class Leadership:
    """Call `hold` before every decision. Time counts from before the request, so the lease expires here first."""

    def __init__(
        self,
        redis_url: str,
        namespace: str,
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._client = connect(redis_url)
        self._keys = lease_keys(namespace)
        self._holder = secrets.token_hex(8)
        self._seconds = lease_seconds
        self._clock = clock
        self._until = 0.0

    def hold(self) -> bool:
        """Take or renew the lease. Returns False if another autoscaler has it; while Redis does not answer, what is still
        sure. Raises redis.RedisError if a server answers that another one must be asked (cluster/redis/failover.py): its
        view is stale."""
        asked = self._clock()
        try:
            ours = bool(self._client.eval(_HOLD, 2, *self._keys, self._holder, int(self._seconds * 1000)))
        except redis.RedisError as error:
            log.warning("the autoscaler's lease is unknown, Redis does not answer: %s", error)
            if disconnect_after_failover(self._client, error):
                raise
            return self.sure()
        self._until = asked + self._seconds if ours else 0.0
        return ours

    def sure(self, seconds: float = 0.0) -> bool:
        """Whether the lease lasts for at least `seconds` more."""
        return self._clock() + seconds < self._until

    def close(self) -> None:
        try:
            self._client.eval(_GIVE_UP, 2, *self._keys, self._holder)
        except redis.RedisError as error:
            log.info("the lease expires by itself, Redis does not answer: %s", error)
        self._client.close()
