"""Rights of `baton autoscale` in Redis: to read the registry, and its own lease."""

from __future__ import annotations

from baton.autoscaler.leader import lease_keys
from cluster.membership import keys
from cluster.redis.rights import Rights


def rights(namespace: str) -> Rights:
    readers = keys.members, keys.leases, keys.status, keys.drains
    return Rights(
        "autoscaler",
        keys=tuple(lease_keys(namespace)),
        commands="del eval get hgetall set time zrange",
        read_keys=tuple(name(namespace) for name in readers),
    )
