"""Cancels a call whose client has stopped reading."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self


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
