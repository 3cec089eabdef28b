"""A bounded handover from producers to one reader, who takes all that is there at once.

Tokens that came while the reader was busy cost it one wake-up together, not one each.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """One event loop, one reader. A producer adds what it has, then waits in `room` while too much lies unread."""

    def __init__(self, bound: int, producers: int = 1):
        self._bound = bound
        self._producers = producers
        self._items: list[T] = []
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def full(self) -> bool:
        return len(self._items) >= self._bound

    def add(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    async def room(self) -> None:
        while self.full and self._error is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def end(self) -> None:
        """One producer has nothing more to say."""
        self._producers -= 1
        self._wake()

    def fail(self, error: BaseException) -> None:
        """The reader gets what lies there, then this error; the first one counts."""
        self._error = self._error or error
        self._wake()
        self._make_room()

    def discard(self, error: BaseException) -> None:
        """Nobody wants what lies there any more."""
        self._items.clear()
        self.fail(error)

    async def take(self) -> list[T]:
        """Everything unread, in order; empty at the end. Raises what `fail` was given."""
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._producers <= 0:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        taken, self._items = self._items, []
        self._make_room()
        return taken

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _make_room(self) -> None:
        if self._waiting:
            for waiter in self._waiting:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting.clear()
