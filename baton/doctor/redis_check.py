"""A Redis of one's own, as an install would use it."""

from __future__ import annotations

import redis

from baton.doctor.checks import Check
from cluster.redis.connect import connect, without_password
from cluster.redis.memory import ADVICE, RedisMemory


def check_redis(url: str) -> Check:
    try:
        client = connect(url)
        try:
            memory = RedisMemory.of(client.info("memory"))
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        return Check(
            "Redis", "missing", f"{without_password(url)}: {error}", "its address, user, or network policy"
        )
    limit = f"{memory.max_bytes / 2**20:,.0f} MiB" if memory.max_bytes else "no maxmemory"
    found = f"{memory.policy or 'unknown policy'}, {limit}, {memory.used_bytes / 2**20:,.0f} MiB used"
    if not memory.evicts_index_only:
        return Check(
            "Redis", "warning", found, f"{ADVICE}, or a full index of prefixes stops everything else"
        )
    if not memory.max_bytes:
        return Check(
            "Redis", "warning", found, "set maxmemory: the index of prefixes takes what it gets for an hour"
        )
    if memory.pressed:
        return Check("Redis", "warning", found, "more maxmemory: placements are not predicted above 70 %")
    return Check("Redis", "ok", found)
