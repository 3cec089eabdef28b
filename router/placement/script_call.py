"""Calls of scripts over one kept connection, without the layers of a general client, a connection for each call, or a
task for its deadline: these cost as much as the call.

Calls do not wait for each other's answers: Redis answers a connection in the order of the calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from cluster.redis.connect import CONNECT_SECONDS, pool_async
from cluster.redis.failover import FailoverError, says_failover
from cluster.redis.memory import always_writes
from cluster.redis.replies import BoundedReader

Argument = bytes | str | int | float
CLOSE_SECONDS = 1.0  # then a connection is aborted: a close over TLS waits for the server's close_notify
_MORE = object()
log = logging.getLogger(__name__)


class ScriptLine:
    """The connection, which is opened by the first call, and again where it was lost."""

    def __init__(self, url: str, on_unanswered: Callable[[], None] = lambda: None):
        """`on_unanswered` is called when a call is given up (cancelled, too late, its connection lost), and again if its
        answer arrives after all: the script may have run."""
        # A timeout of the pool's would start a task for every command of the handshake.
        self._pool = pool_async(url, None)
        self._on_unanswered = on_unanswered
        self._line: _Line | None = None
        self._opening: asyncio.Task[_Line] | None = None

    @property
    def current(self) -> _Line | None:
        """The connection, if it is open and leads to the server that has the keys."""
        line = self._line
        if line is not None and line.open and line.replaced():
            line.retire()
        return line if line is not None and line.open else None

    async def open(self) -> _Line:
        """The connection, which is opened where it is not. That goes on for CONNECT_SECONDS if all callers give up, and
        serves the next one: a name, TLS and a login may take longer than any call waits, and none would ever be made."""
        if (line := self.current) is not None:
            return line
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> _Line:
        async with asyncio.timeout(CONNECT_SECONDS):
            self._line = line = await _Line.to_redis(self._pool, self._on_unanswered)
        return line

    def _opened(self, opening: asyncio.Task[_Line]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # its callers may all have given up

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        if self._line is not None:
            await self._line.close_and_wait(CLOSE_SECONDS)
        await self._pool.aclose()


class ScriptCall:
    def __init__(self, to: str | ScriptLine, script: str, on_unanswered: Callable[[], None] = lambda: None):
        """`to`: a URL, or a connection that other scripts use too. `on_unanswered`: as ScriptLine's, for a URL."""
        self._connection = ScriptLine(to, on_unanswered) if isinstance(to, str) else to
        self._script = script = always_writes(script)
        self._sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._sent_to: _Line | None = None  # the connection by which `send` has sent the whole script

    async def __call__(self, keys: Sequence[str], arguments: Sequence[Argument], seconds: float) -> Any:
        """The script's answer. Raises redis.RedisError, OSError, or TimeoutError after `seconds`."""
        rest = (len(keys), *keys, *arguments)
        packed = hiredis.pack_command(("EVALSHA", self._sha, *rest))  # type: ignore[arg-type]
        line = self._connection.current
        if line is not None:
            try:
                return await line.ask(packed, seconds)
            except NoScriptError:
                pass
            except redis.ConnectionError:  # Redis was restarted or failed over
                pass
        async with asyncio.timeout(seconds):
            line = await self._connection.open()
        try:
            return await line.ask(packed, seconds)
        except NoScriptError:  # a new Redis, or a promoted replica
            return await line.ask(self._whole(rest), seconds)

    def send(
        self,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        seconds: float,
        failed: Callable[[BaseException], None],
    ) -> bool:
        """Call without waiting for the answer, before any later call of this connection. `failed`: it was not executed, as
        far as is known. Returns False, and calls nothing, while there is no connection."""
        line, rest = self._connection.current, (len(keys), *keys, *arguments)
        if line is None:
            return False

        def ended(answer: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
            if isinstance(error, NoScriptError) and line.open:  # flushed; later calls may come first
                line.tell(self._whole(rest), seconds, failed_only)
            elif error is not None:
                failed(error)

        def failed_only(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled() and (error := answer.exception()) is not None:
                failed(error)

        # Whole, where this server may not have it: a refusal would come too late to keep the order.
        known, self._sent_to = self._sent_to is line, line
        short = hiredis.pack_command(("EVALSHA", self._sha, *rest)) if known else b""  # type: ignore[arg-type]
        line.tell(short or self._whole(rest), seconds, ended)
        return True

    def _whole(self, rest: Sequence[Argument]) -> bytes:
        """The call with the script's text."""
        packed: bytes = hiredis.pack_command(("EVAL", self._script, *rest))  # type: ignore[arg-type]
        return packed

    async def close(self) -> None:
        """The connection, with all scripts that use it."""
        await self._connection.close()


class _Line(asyncio.Protocol):
    """A connection to Redis. After a late answer it gets no further calls: it may hang for ever."""

    def __init__(
        self,
        writer: asyncio.StreamWriter,
        on_unanswered: Callable[[], None],
        replaced: Callable[[], bool],
    ):
        """`replaced`: whether another server has the keys now."""
        self.replaced = replaced
        self._writer = writer  # referenced, because it closes its connection when it is collected
        self._transport = writer.transport
        self._on_unanswered = on_unanswered
        self._loop = asyncio.get_running_loop()
        self._reader = BoundedReader(
            hiredis.Reader(protocolError=redis.InvalidResponse, replyError=_error, notEnoughData=_MORE), _MORE
        )
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._lost = asyncio.Event()
        self.open = True

    @classmethod
    async def to_redis(cls, pool: redis.asyncio.ConnectionPool, on_unanswered: Callable[[], None]) -> _Line:
        """The client connects (address, TLS, user, database); after its handshake the protocol is this class's."""
        connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        writer, connection._writer = connection._writer, None
        # Only a connection found through Sentinels learns it so; a cluster's node answers MOVED.
        line = cls(writer, on_unanswered, lambda: getattr(connection, "replaced", False))
        writer.transport.set_protocol(line)
        return line

    def tell(self, packed: bytes, seconds: float, done: Callable[[asyncio.Future[Any]], None]) -> None:
        """Send a call whose answer, or error after `seconds`, goes to `done`."""
        answer, deadline = self._sent(packed, seconds)

        def ended(answer: asyncio.Future[Any]) -> None:
            deadline.cancel()
            done(answer)

        answer.add_done_callback(ended)

    def _sent(self, packed: bytes, seconds: float) -> tuple[asyncio.Future[Any], asyncio.TimerHandle]:
        answer = self._loop.create_future()
        self._asked.append(answer)
        self._transport.write(packed)
        return answer, self._loop.call_later(seconds, self._late, answer)

    async def ask(self, packed: bytes, seconds: float) -> Any:
        answer, deadline = self._sent(packed, seconds)
        try:
            return await answer
        except (redis.ResponseError, FailoverError):
            raise
        except BaseException:
            self._on_unanswered()
            raise
        finally:
            deadline.cancel()
            self._close_if_idle()  # it may have been the last one that a retired connection waited for

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data)
        except redis.InvalidResponse as error:
            # Where the next reply begins is unknown
            log.warning("a connection to Redis is closed; what it answers is not a reply: %s", error)
            self.open = False
            self._transport.abort()
        self._close_if_idle()

    def _read(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not _MORE:
            if isinstance(reply, hiredis.PushNotification):
                continue
            if not self._asked:
                raise redis.InvalidResponse("an answer without a call")
            if isinstance(reply, FailoverError):
                self.open = False
            answer = self._asked.popleft()
            if answer.done():  # given up: too late, or cancelled
                self._on_unanswered()
                continue
            if isinstance(reply, redis.RedisError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(redis.ConnectionError(f"the connection was lost: {error or 'closed'}"))
        self._asked.clear()
        self._lost.set()

    def _late(self, answer: asyncio.Future[Any]) -> None:
        if answer.done():
            return
        answer.set_exception(TimeoutError("Redis did not answer in time"))
        self.retire()

    def retire(self) -> None:
        """Give it no further calls, and close it when those that wait have ended."""
        self.open = False
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        """Calls that still wait on it may yet be answered."""
        if not self.open and all(answer.done() for answer in self._asked):
            self.close()

    def close(self) -> None:
        self.open = False
        self._transport.close()

    async def close_and_wait(self, seconds: float) -> None:
        """Close, and wait until the connection is gone; abort it after `seconds`."""
        self.close()
        try:
            async with asyncio.timeout(seconds):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()
            await self._lost.wait()  # the loop's next iteration sets it


def _error(text: str) -> redis.RedisError:
    code, _, rest = text.partition(" ")
    if says_failover(text):
        return FailoverError(text)
    return NoScriptError(rest) if code == "NOSCRIPT" else redis.ResponseError(text)


class RedisBackoff:
    """When Redis is called again after it did not answer.

    After a pause one call probes it; all others go on without Redis until the probe is answered. The pause is random, so
    that routers that lost Redis at the same moment do not return at the same moment.
    """

    def __init__(
        self,
        seconds: float,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._seconds = seconds
        self._rng = rng or random.Random()
        self._clock = clock
        self._until = 0.0  # 0: the last call was answered

    def may_ask(self) -> bool:
        """Whether to call Redis now; after a failure True once per pause, for the caller that probes it."""
        if self._until == 0.0:
            return True
        if self._clock() < self._until:
            return False
        # Another call may probe after the next pause, even if this one is cancelled and reports nothing.
        self.failed()
        return True

    @property
    def is_failing(self) -> bool:
        """Whether the last call was not answered."""
        return self._until != 0.0

    def answered(self) -> None:
        self._until = 0.0

    def failed(self) -> None:
        self._until = self._clock() + self._seconds * self._rng.uniform(0.5, 1.0)
