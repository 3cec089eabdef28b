"""Redis answers that mean "ask another server" or "not ready yet": READONLY, MOVED, LOADING, CLUSTERDOWN and the like.

After a failover the address leads to another server. A client that gets such an answer closes the connection; its next
call resolves the address again.
"""

from __future__ import annotations

import re

import redis
import redis.asyncio
from redis.exceptions import AskError, ClusterDownError, TryAgainError

_CODES = "READONLY|MOVED|ASK|TRYAGAIN|LOADING|CLUSTERDOWN|MASTERDOWN"
# Redis before 7 wraps the error of a script: "ERR Error running script (…): …: -READONLY You …".
_SAID = re.compile(rf"^(?:{_CODES}) |: -(?:{_CODES}) ")
_TYPES = (redis.ReadOnlyError, redis.BusyLoadingError, AskError, ClusterDownError, TryAgainError)


class FailoverError(redis.ConnectionError):
    """The call was not executed: retry at another server, or at this one later."""


def says_failover(answer: str) -> bool:
    """Whether an error, as text from the wire, has one of these codes."""
    return bool(_SAID.search(answer))


def _is_failover(error: redis.RedisError) -> bool:
    return isinstance(error, _TYPES) or (isinstance(error, redis.ResponseError) and says_failover(str(error)))


def disconnect_after_failover(client: redis.Redis, error: redis.RedisError) -> bool:
    """Whether `error` means that another server must be asked; the idle connections of `client` are closed then."""
    failover = _is_failover(error)
    if failover:
        client.connection_pool.disconnect(inuse_connections=False)
    return failover


async def disconnect_after_failover_async(client: redis.asyncio.Redis, error: BaseException) -> None:
    """`disconnect_after_failover` for an asyncio client."""
    if isinstance(error, redis.RedisError) and _is_failover(error):
        await client.connection_pool.disconnect(inuse_connections=False)
