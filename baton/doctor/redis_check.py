"""The check of an external Redis: reachable, memory limit, eviction policy."""

from __future__ import annotations

import redis

from baton.doctor.checks import Check
from cluster.redis.connect import connect
from cluster.redis.memory import ADVICE, RedisMemory
from cluster.redis.urls import without_password


def check_redis(url: str) -> Check:
    """Read INFO memory of the server at `url` and judge it; never raises for a server that does not answer."""
    try:
        client = connect(url)
        try:
            memory = RedisMemory.of(client.info("memory"))
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        return Check(
            "Redis",
            "missing",
            f"{without_password(url)}: {error}",
            "check its address, user and network policy",
        )
    limit = f"{memory.max_bytes / 2**20:,.0f} MiB" if memory.max_bytes else "no maxmemory"
    found = f"{memory.policy or 'unknown policy'}, {limit}, {memory.used_bytes / 2**20:,.0f} MiB used"
    if not memory.evicts_index_only:
        return Check(
            "Redis", "warning", found, f"{ADVICE}: otherwise a full prefix index fails every other write"
        )
    if not memory.max_bytes:
        return Check(
            "Redis",
            "warning",
            found,
            "set maxmemory: without it only the one-hour TTL bounds the prefix index",
        )
    if memory.pressed:
        return Check("Redis", "warning", found, "raise maxmemory: above 70 % placements are not predicted")
    return Check("Redis", "ok", found)
