"""Ends a call whose client has stopped reading."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from google.protobuf.message import Message

from cluster.config.router import RouterConfig
from cluster.errors import CancelledError
from router.frontends.grpc.gate import Context


class WriteDeadline:
    """Calls `expired` once when a write takes longer than `seconds`.

    One timer per call checks at intervals: a timer per token would cost more than the write.
    """

    def __init__(self, seconds: float, expired: Callable[[], None]):
        self._seconds = seconds
        self._expired = expired
        self._since = 0.0  # 0 = not writing
        self._timer = asyncio.get_running_loop().call_later(seconds / 4, self._check)

    def begin(self) -> None:
        """A write begins now."""
        self._since = time.monotonic()

    def end(self) -> None:
        """No write is under way."""
        self._since = 0.0

    def close(self) -> None:
        self._timer.cancel()

    @property
    def error(self) -> CancelledError:
        return CancelledError(f"the client read nothing for {self._seconds:g} s (write_seconds)")

    def _check(self) -> None:
        if self._since and time.monotonic() - self._since > self._seconds:
            self._expired()
            return
        self._timer = asyncio.get_running_loop().call_later(self._seconds / 4, self._check)


async def write_all(
    responses: AsyncGenerator[Message | bytes, None],
    context: Context,
    config: RouterConfig,
) -> None:
    """Raises CancelledError if the client reads nothing for `write_seconds`."""
    task = asyncio.current_task()
    assert task is not None, "called inside a task"
    expired = False

    def cancel() -> None:
        nonlocal expired
        expired = True
        task.cancel()

    deadline = WriteDeadline(config.write_seconds, cancel)
    try:
        # However this ends, closing the responses ends what makes them.
        async with contextlib.aclosing(responses):
            async for response in responses:
                deadline.begin()
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
