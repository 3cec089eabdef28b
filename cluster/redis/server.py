"""Requirements on a Redis server, checked by its INFO."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import redis

from cluster.redis.connect import connect
from cluster.redis.urls import Kind, seeds_of, without_password

OLDEST = (6, 2)


def why_unusable(info: Mapping[str, Any], kind: Kind | None) -> str:
    """The reason why a server with this INFO, at a URL of this kind, cannot be used, and what to use; "" if it can."""
    # Forks write suffixes, and a proxy may leave lines out: what is not said is no reason.
    version = tuple(int(number) for number in re.findall(r"\d+", _version(info))[:2])
    if version and version < OLDEST:
        return f"Redis {'.'.join(map(str, OLDEST))} or later, or Valkey, is needed"
    if info.get("role", "master") != "master":
        return "it takes no writes: name the master, or its Sentinels: redis+sentinel://…"
    if info.get("cluster_enabled") and kind != "cluster":
        return "it is a node of a cluster, where keys move: write redis+cluster://…"
    return ""


def ask_why_unusable(url: str) -> str:
    """The server's address, what it is, and what to use instead; "" if it can be used, or does not show its INFO."""
    try:
        client = connect(url)
        try:
            info = client.info()
        finally:
            client.close()
    except redis.RedisError:  # its user may lack the right
        return ""
    seeds = seeds_of(url)
    why = why_unusable(info, seeds.kind if seeds is not None else None)
    what = ", ".join(filter(None, (f"Redis {_version(info)}".strip(), str(info.get("role", "")))))
    return f"{without_password(url)} is {what}: {why}" if why else ""


def _version(info: Mapping[str, Any]) -> str:
    return str(info.get("redis_version", ""))
