"""Ends a call whose client has stopped reading."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar

from google.protobuf.message import Message

from cluster.config.router import RouterConfig
from cluster.errors import CancelledError
from cluster.process.standstill import standstill
from router.frontends.grpc.gate import Context

# Of the call that a task serves: the write of its metadata.
_opening: ContextVar[asyncio.Future[None] | None] = ContextVar("opening", default=None)


class WriteDeadline:
    """Calls `expired` once when a write takes longer than `seconds`.

    One timer per call checks at intervals: a timer per token would cost more than the write.
    """

    def __init__(self, seconds: float, expired: Callable[[], None]):
        self._seconds = seconds
        self._expired = expired
        self._since = 0.0  # 0 = not writing
        self._loop = asyncio.get_running_loop()
        self._check_later()

    def begin(self) -> None:
        """A write begins now."""
        self._since = self._loop.time()

    def end(self) -> None:
        """No write is under way."""
        self._since = 0.0

    def close(self) -> None:
        self._timer.cancel()

    @property
    def error(self) -> CancelledError:
        return CancelledError(f"the client read nothing for {self._seconds:g} s (write_seconds)")

    def _check_later(self) -> None:
        self._due = self._loop.time() + self._seconds / 4
        self._timer = self._loop.call_later(self._seconds / 4, self._check)

    def _check(self) -> None:
        now = self._loop.time()
        if self._since:  # what the client has read during a standstill is not known yet
            # A write may have begun since, in this turn
            self._since = min(self._since + standstill(self._due, now), now)
        if self._since and now - self._since > self._seconds:
            self._expired()
            return
        self._check_later()


def status_waits_for(opening: asyncio.Future[None] | None) -> None:
    """Of the call that this task serves; `opening`: the write of its metadata, None: not begun."""
    _opening.set(opening)


async def metadata_written() -> None:
    """Return once what has begun to be written of this call's metadata is written, or its client has gone. Until then
    gRPC refuses a status, and the call would stay open without one."""
    opening = _opening.get()
    if opening is not None and not opening.done():
        await asyncio.wait({opening})


async def write_all(
    responses: AsyncGenerator[Message | bytes, None],
    context: Context,
    config: RouterConfig,
) -> None:
    """Write the metadata, then each response. Raises CancelledError if the client reads nothing for `write_seconds`: where
    its connection is not read at all, the metadata waits too.
    """
    task = asyncio.current_task()
    assert task is not None, "called inside a task"
    expired = False

    def cancel() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    deadline, opened = WriteDeadline(config.write_seconds, cancel), False
    try:
        # However this ends, closing the responses ends what makes them.
        async with contextlib.aclosing(responses):
            async for response in responses:
                deadline.begin()
                if not opened:
                    # With a message that is never read, the status would repeat it, which gRPC refuses.
                    opening = asyncio.ensure_future(context.send_initial_metadata(()))
                    status_waits_for(opening)
                    await asyncio.shield(opening)  # gRPC writes them even if this call gives up
                    opened = True
                await context.write(response if isinstance(response, bytes) else response.SerializeToString())
                deadline.end()
    except asyncio.CancelledError:
        if not expired:
            raise
        # If this task were cancelled, grpc.aio would leave the call open without a status.
        task.uncancel()
        raise deadline.error from None
    finally:
        deadline.close()
