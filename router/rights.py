"""Rights of a router in Redis: the registry, the prefix index, which may be apart, and the routers' own tables."""

from __future__ import annotations

from cluster.config.router import RouterConfig
from cluster.index.scripts import prefix
from cluster.membership import keys
from cluster.redis.rights import Rights, by_server
from router.placement.keys import PlacementKeys
from router.quota.scripts import script_keys


def rights(namespace: str) -> Rights:
    """A router deletes dead workers from the registry. Any router drops the charges of one that died."""
    placement = PlacementKeys(namespace, "*")
    own = {*placement.place("*"), *placement.settle("*"), *script_keys(namespace, "*", "*")}
    own -= {placement.charges("*")}
    own |= {
        placement.all_charges,
        keys.sets(namespace),
        keys.router_reports(namespace),
        keys.adapters(namespace),
        prefix(namespace, "*") + "*",
    }
    registry = keys.registry(namespace)
    return Rights(
        "router",
        keys=(*registry, *sorted(own - {*registry})),
        commands=(
            "append decr del eval evalsha exists get hdel hexists hget hgetall hincrby hlen hmget hrandfield hscan hset "
            "hsetnx incr info pexpireat script|load set time zadd zcard zcount zmscore zrange zrangebyscore zrem "
            "zremrangebyrank zscore"
        ),
    )


def index_rights(namespace: str) -> Rights:
    """The rights of a user of the prefix index's own Redis."""
    return Rights(
        "router-index",
        keys=(prefix(namespace, "*") + "*",),  # the copies of slots too (cluster/index/slot_keys.py)
        commands=(
            "append del eval evalsha exists get hdel hexists hgetall hlen hmget hrandfield hset info pexpireat "
            "script|load set time"
        ),
    )


def redis_rights(config: RouterConfig) -> list[tuple[str, Rights]]:
    """The servers, and what the router needs of each."""
    return by_server(config, rights(config.namespace), index_rights(config.namespace))
