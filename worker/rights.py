"""What a worker needs of Redis: the registry and the prefix index."""

from __future__ import annotations

from cluster.index.scripts import prefix
from cluster.membership import keys
from cluster.redis.rights import Rights


def rights(namespace: str) -> Rights:
    """With those of `baton drain --self`, which runs beside it."""
    return Rights(
        "worker",
        keys=(*keys.registry(namespace), keys.sets(namespace), prefix(namespace, "*") + "*"),
        read_keys=(keys.load(namespace),),
        commands=(
            "append del eval evalsha exists get hdel hexists hget hgetall hmget hset incr info pexpireat "
            "script|load set time zadd zcard zrange zrem zscore"
        ),
    )
