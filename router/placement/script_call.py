"""One script, called over kept connections with nothing between: a general client's layers cost as much as the call."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import hiredis
import redis
import redis.asyncio
from redis.exceptions import NoScriptError

MAX_IDLE = 64
Argument = bytes | str | int | float


class ScriptCall:
    """Every call must stand under a deadline of the caller's: a connection that is cut off by it is closed."""

    def __init__(self, url: str, script: str):
        # Deadlines of its own would start a task for every command.
        self._pool = redis.asyncio.ConnectionPool.from_url(url, socket_timeout=None)
        self._script = script
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._idle: list[Any] = []

    async def __call__(self, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """The script's answer. Raises redis.RedisError or OSError."""
        rest = (len(keys), *keys, *arguments)
        packed = hiredis.pack_command(("EVALSHA", self._sha, *rest))  # type: ignore[arg-type]
        connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return await self._ask(connection, packed)
            except NoScriptError:
                pass
            except redis.ConnectionError:  # Redis was restarted: the other ones are gone as well
                await self._forget()
        connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        await connection.connect()
        try:
            return await self._ask(connection, packed)
        except NoScriptError:  # a new Redis, or one that has taken over
            connection = self._idle.pop()
            whole = hiredis.pack_command(("EVAL", self._script, *rest))  # type: ignore[arg-type]
            return await self._ask(connection, whole)

    async def _ask(self, connection: Any, packed: bytes) -> Any:
        sound = False
        try:
            await connection.send_packed_command(packed, check_health=False)
            answer = await connection.read_response(timeout=math.inf)
            sound = True
            return answer
        except redis.ResponseError:
            sound = True
            raise
        finally:
            if sound and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)

    async def _forget(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def close(self) -> None:
        await self._forget()
        await self._pool.aclose()
