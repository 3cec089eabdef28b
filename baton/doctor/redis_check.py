"""The checks of an external Redis: reachable, version, role, memory limit, eviction policy, and what its user may do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import redis
from redis.crc import key_slot

from baton.autoscaler.rights import rights as of_autoscaler
from baton.doctor.checks import Check, Finding
from cluster.redis.connect import connect
from cluster.redis.memory import ADVICE, RedisMemory
from cluster.redis.rights import Component, Rights, lacking
from cluster.redis.server import why_unusable
from cluster.redis.urls import Kind, seeds_of, with_hash_tag, without_password
from router.rights import index_rights as of_routers_index
from router.rights import rights as of_router
from worker.rights import index_rights as of_workers_index
from worker.rights import rights as of_worker

RIGHTS: Mapping[Component, Callable[[str], Rights]] = {
    "router": of_router,
    "worker": of_worker,
    "autoscaler": of_autoscaler,
    "router-index": of_routers_index,
    "worker-index": of_workers_index,
}


def check_redis(url: str) -> Check:
    """Read INFO memory of an external Redis and judge it; never raises for a server that does not answer."""
    try:
        client = connect(url)
        try:
            memory = RedisMemory.of(client.info("memory"))
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        return _unread("Redis", url, error)
    limit = f"{memory.max_bytes / 2**20:,.0f} MiB" if memory.max_bytes else "no maxmemory"
    found = f"{memory.policy or 'unknown policy'}, {limit}, {memory.used_bytes / 2**20:,.0f} MiB used"
    advice = ""
    if not memory.evicts_index_only:
        advice = f"{ADVICE}: otherwise a full Redis {memory.when_full}"
    elif not memory.max_bytes:
        advice = "set maxmemory: without it only the one-hour TTL bounds the prefix index"
    elif memory.pressed:
        advice = "raise maxmemory: above 70 % placements are not predicted"
    return Check("Redis", "warning" if advice else "ok", found, advice)


def _unread(name: str, url: str, error: Exception) -> Check:
    found = f"{without_password(url)}: {error}"
    if isinstance(error, redis.exceptions.NoPermissionError):
        advice = "give --redis-url with the user of a router or worker, or add +info to this one's rights"
        return Check(name, "warning", found, advice)
    return Check(name, "missing", found, "check its address, user and network policy")


def check_server(url: str, namespace: str) -> Check:
    """Whether the server with the keys of `namespace` is one that Baton can use: its version, its role, its kind."""
    try:
        client = connect(with_hash_tag(url, namespace))
        try:
            info = client.info()
        finally:
            client.close()
    except (redis.RedisError, ValueError) as error:
        return _unread("Redis server", url, error)
    seeds = seeds_of(url)
    # A proxy may leave lines out, as in why_unusable
    role, replicas = str(info.get("role", "of unknown role")), info.get("connected_slaves")
    found = f"Redis {info.get('redis_version', 'of unknown version')}, {role}"
    if seeds is not None and seeds.kind == "cluster":
        tag = f"{{{namespace}}}"
        found += f" of slot {key_slot(tag.encode())}, which has all keys {tag}:*"
    elif role == "master" and replicas is not None:
        found += f" with {replicas} replica(s)"
    return Check("Redis server", *_judge_server(info, seeds.kind if seeds is not None else None, found))


def _judge_server(info: Mapping[str, Any], kind: Kind | None, found: str) -> Finding:
    if why := why_unusable(info, kind):
        return Finding("missing", found, why)
    if kind == "sentinel" and info.get("connected_slaves") == 0:
        return Finding("warning", found, "the master has no replica that its Sentinels could promote")
    return Finding("ok", found)


def check_rights(url: str, component: Component, namespace: str) -> Check:
    """Whether the user of `url` may do what a component does with the keys of `namespace`."""
    name = f"Redis rights ({component})"
    try:
        client = connect(url)
        try:
            missing = lacking(client, RIGHTS[component](namespace))
        finally:
            client.close()
    except (redis.RedisError, OSError, ValueError) as error:
        return Check(name, "missing", f"{without_password(url)}: {error}", "check its address and user")
    if missing is None:
        return Check(
            name,
            "warning",
            "unknown, its user may not use MULTI",
            "add +multi +discard to the user: ACL SETUSER",
        )
    if missing:
        return Check(name, "missing", f"lacks {' '.join(missing)}", "add these to the user: ACL SETUSER")
    return Check(name, "ok", f"all that keys {{{namespace}}}:* need")
