"""A queue from producers to one reader, which takes all items at once.

Tokens that arrive while the reader is busy cost it one wake-up together, not one each. A reader for which every wake-up
costs a system call sets a pace: items that follow a batch within it wait for the rest of that time, so a burst leaves in
a few pieces, while the first token, and any after a pause, is never held.

It holds what its producers were allowed to add: an attempt's tokens are bounded by the limits that it grants when the
reader has taken everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BatchQueue(Generic[T]):
    """One event loop, one reader."""

    def __init__(self, producers: int = 1, pace_seconds: float = 0.0):
        self._producers = producers
        self._pace = pace_seconds
        self._taken = 0.0  # when, by the loop's clock
        self._loop = asyncio.get_running_loop()  # asking again for every token would cost a system call each
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._when_drained: list[Callable[[], None]] = []

    def when_drained(self, call: Callable[[], None]) -> None:
        """`call` it, once, when the reader has dealt with every item and waits for another."""
        self._when_drained.append(call)
        self._wake()

    async def drained(self) -> float:
        """Wait until the reader has dealt with every item and waits for another. Returns the seconds waited."""
        began, waiting = self._loop.time(), self._loop.create_future()

        def wake() -> None:
            if not waiting.done():  # else the caller was cancelled
                waiting.set_result(None)

        self.when_drained(wake)
        await waiting
        return self._loop.time() - began

    def add(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def end(self) -> None:
        """One producer has ended."""
        self._producers -= 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets the unread items, then this error; the first error counts."""
        self._error = self._error or error
        self._wake()

    def discard(self, error: BaseException) -> None:
        """Drop the unread items and end with the error."""
        self._items.clear()
        self.fail(error)

    async def take(self) -> list[T]:
        """Everything unread, in order; empty at the end. Raises what `fail` was given."""
        while True:
            if self._items:
                early = self._early()
                if early <= 0.0:
                    break
                await asyncio.sleep(early)
            elif self._error is not None:
                raise self._error
            elif self._producers <= 0:
                return []
            else:
                if self._when_drained:
                    self._drained()
                await self._something()
        taken, self._items = self._items, []
        return taken

    def _early(self) -> float:
        """Seconds until the next batch may leave; the last one does not wait.

        At half the pace it is time: uvloop's clock ticks in milliseconds, and asked to wait for the 1e-13 s that
        rounding may leave over it turns, without waiting, until the next tick.
        """
        if not self._pace or self._producers <= 0 or self._error is not None:
            return 0.0
        now = self._loop.time()
        early = self._taken + self._pace - now
        if early > self._pace / 2:
            return early
        self._taken = now
        return 0.0

    async def _something(self) -> None:
        self._reader = self._loop.create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _drained(self) -> None:
        calls, self._when_drained = self._when_drained, []
        for call in calls:
            call()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
