"""Tasks that outlive their caller: referenced until they end, failures logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a task without waiting for it."""
        self._start(coroutine).add_done_callback(self._log_failure)

    async def complete(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a task that runs to its end even if the caller is cancelled.

        For work that allocates and releases: a cancellation half-way would leak.
        """
        task = self._start(coroutine)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(self._log_failure)
            raise

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until all tasks have ended or the time is up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_seconds)

    @staticmethod
    def _log_failure(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())
