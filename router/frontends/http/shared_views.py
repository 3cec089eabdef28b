"""Views of the router's state, each made once for all requests that wait for it.

Making one takes ten milliseconds of the event loop and more, ten times what a step of low priority may take: made for each
of a few hundred requests that came at once, they would hold up every stream for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

# Between the beginnings of two views of any kind: all together take a fifth of the event loop, or little more.
PACE_SECONDS = 0.05
T = TypeVar("T")


class SharedViews:
    """What a request is answered was made after it had come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._next_at = 0.0
        self._waiting: dict[str, asyncio.Task[Any]] = {}  # by kind, until it is begun

    async def get(self, kind: str, make: Callable[[], Awaitable[T]]) -> T:
        """The view of this kind; `make` makes it. Raises what that raises."""
        task: asyncio.Task[T] | None = self._waiting.get(kind)
        if task is None:
            task = self._waiting[kind] = asyncio.create_task(self._made(kind, make))
            task.add_done_callback(_seen)
        return await asyncio.shield(task)  # a client that leaves ends it for no other

    async def _made(self, kind: str, make: Callable[[], Awaitable[T]]) -> T:
        now = self._clock()
        begin = max(now, self._next_at)
        self._next_at = begin + PACE_SECONDS
        try:
            await asyncio.sleep(begin - now)
        finally:
            self._waiting.pop(kind, None)
        return await make()


def _seen(task: asyncio.Task[Any]) -> None:
    """Take its error, which every waiting request raises: without one, asyncio would log it as never retrieved."""
    if not task.cancelled():
        task.exception()
