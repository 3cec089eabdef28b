"""A task that repeats an action."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class Periodic:
    """Runs `action` at `start` and `seconds` after each end of it. An exception is logged, and the action is repeated."""

    def __init__(self, what: str, seconds: float, action: Callable[[], Awaitable[None]]):
        """`what` the action does, for the log."""
        self._what = what
        self._seconds = seconds
        self._action = action
        self._closed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self, timeout_seconds: float) -> None:
        """Let an action in progress end. It is not cancelled: the Redis client may swallow a cancellation that meets its
        own deadline."""
        self._closed.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_seconds)

    async def _run(self) -> None:
        while not self._closed.is_set():
            try:
                await self._action()
            except Exception:
                log.exception("%s failed; retrying", self._what)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await self._closed.wait()
