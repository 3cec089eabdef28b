"""Cancels a call whose client has stopped reading."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from google.protobuf.message import Message

from cluster.config.router import RouterConfig
from cluster.errors import CancelledError
from router.frontends.grpc.gate import Context


class WriteDeadline:
    """Cancels the task that made it when one write inside `with writing:` takes longer than `seconds`.

    One timer per call checks at intervals: a timer per token would cost more than the write.
    """

    def __init__(self, seconds: float):
        task = asyncio.current_task()
        assert task is not None, "made inside a task"
        self._task = task
        self._seconds = seconds
        self._since = 0.0  # 0 = not writing
        self.expired = False
        self._timer = asyncio.get_running_loop().call_later(seconds / 4, self._check)

    def __enter__(self) -> Self:
        self._since = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._since = 0.0

    def uncancel(self) -> None:
        """Take back this deadline's cancellation of the task, once it has been handled."""
        self._task.uncancel()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if self._since and time.monotonic() - self._since > self._seconds:
            self.expired = True
            self._task.cancel()
            return
        self._timer = asyncio.get_running_loop().call_later(self._seconds / 4, self._check)


async def write_all(
    responses: AsyncGenerator[Message, None],
    context: Context,
    config: RouterConfig,
) -> None:
    """Raises CancelledError if the client reads nothing for `write_seconds`."""
    seconds = config.write_seconds
    deadline = WriteDeadline(seconds)
    try:
        # However this ends, closing the responses cancels the request at its workers.
        async with contextlib.aclosing(responses):
            async for response in responses:
                with deadline:
                    await context.write(response)
    except asyncio.CancelledError:
        if not deadline.expired:
            raise
        # If this task were cancelled, grpc.aio would leave the call open without a status.
        deadline.uncancel()
        raise CancelledError(f"the client read nothing for {seconds:g} s (write_seconds)") from None
    finally:
        deadline.close()
