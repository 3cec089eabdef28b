"""Rights of a worker in Redis: the registry and the prefix index, which may be apart."""

from __future__ import annotations

from cluster.config.worker import WorkerConfig
from cluster.index.scripts import prefix
from cluster.membership import keys
from cluster.redis.rights import Rights, by_server


def rights(namespace: str) -> Rights:
    """With those of `baton drain --self`, which runs beside it."""
    return Rights(
        "worker",
        keys=(
            *keys.registry(namespace),
            keys.adapters(namespace),
            keys.sets(namespace),
            prefix(namespace, "*") + "*",
        ),
        read_keys=(keys.load(namespace),),
        commands=(
            "append del eval evalsha exists get hdel hexists hget hgetall hmget hset incr info pexpireat "
            "script|load set time zadd zcard zrange zrem zscore"
        ),
    )


def index_rights(namespace: str) -> Rights:
    """The rights of a user of the prefix index's own Redis."""
    return Rights(
        "worker-index",
        keys=(prefix(namespace, "*") + "*",),  # the copies of slots too (cluster/index/slot_keys.py)
        commands=(
            "append del eval evalsha exists get hdel hexists hget hgetall hmget hset info pexpireat script|load set time "
            "zadd zrange zrem zscore"
        ),
    )


def redis_rights(config: WorkerConfig) -> list[tuple[str, Rights]]:
    """The servers, and what the worker needs of each."""
    return by_server(config, rights(config.namespace), index_rights(config.namespace))
