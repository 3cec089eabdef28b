"""Answers by which a Redis server says that another one is asked now, or that it cannot answer yet.

After a failover the address leads to another server. Who gets such an answer closes the connection; the next call
resolves the address again.
"""

from __future__ import annotations

import re

import redis
import redis.asyncio
from redis.exceptions import AskError, ClusterDownError, TryAgainError

_CODES = "READONLY|MOVED|ASK|TRYAGAIN|LOADING|CLUSTERDOWN|MASTERDOWN"
# Redis before 7 puts a script's error into a sentence of its own: "ERR Error running script (…): …: -READONLY You …".
_SAID = re.compile(rf"^(?:{_CODES}) |: -(?:{_CODES}) ")
_TYPES = (redis.ReadOnlyError, redis.BusyLoadingError, AskError, ClusterDownError, TryAgainError)


class ElsewhereError(redis.ConnectionError):
    """The server is not, or not now, the one to ask; nothing was carried out."""


def says_elsewhere(answer: str) -> bool:
    """Of an error as it stands on the wire."""
    return bool(_SAID.search(answer))


def _is_elsewhere(error: redis.RedisError) -> bool:
    return isinstance(error, _TYPES) or (
        isinstance(error, redis.ResponseError) and says_elsewhere(str(error))
    )


def leave(client: redis.Redis, error: redis.RedisError) -> None:
    """Closes the connections of `client` that are free, where `error` says that another server is to be asked."""
    if _is_elsewhere(error):
        client.connection_pool.disconnect(inuse_connections=False)


async def leave_async(client: redis.asyncio.Redis, error: BaseException) -> None:
    if isinstance(error, redis.RedisError) and _is_elsewhere(error):
        await client.connection_pool.disconnect(inuse_connections=False)
