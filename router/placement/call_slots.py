"""How many placements of a router Redis is asked for at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.placement.types import PriorityClass

# More would wait in Redis instead, where none can be cancelled or passed by a higher class, until all are too late.
MAX_AT_A_TIME = 32
WAIT_SECONDS = 5.0
_RANKS: dict[PriorityClass, int] = {"high": 0, "normal": 1, "batch": 2}


class CallSlots:
    """Waiting placements take turns by class, then by arrival."""

    def __init__(self, most: int = MAX_AT_A_TIME):
        self._free = most
        # By rank, in order of arrival. A wait that has ended is removed at once: a low class may get no turn for hours.
        self._waiting = [OrderedDict[asyncio.Future[None], None]() for _ in _RANKS]

    @asynccontextmanager
    async def slot(self, priority_class: PriorityClass) -> AsyncIterator[bool]:
        """Whether there is one; False after WAIT_SECONDS."""
        taken = await self._take(priority_class)
        try:
            yield taken
        finally:
            if taken:
                self._give()

    async def _take(self, priority_class: PriorityClass) -> bool:
        if self._free:
            self._free -= 1
            return True
        granted = asyncio.get_running_loop().create_future()
        waiting = self._waiting[_RANKS[priority_class]]
        waiting[granted] = None
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await granted
        except TimeoutError:
            return self._got(granted)
        except BaseException:
            if self._got(granted):
                self._give()
            raise
        finally:
            waiting.pop(granted, None)
        return True

    @staticmethod
    def _got(granted: asyncio.Future[None]) -> bool:
        """Granted in the turn in which the wait ended otherwise."""
        return granted.done() and not granted.cancelled()

    def _give(self) -> None:
        for waiting in self._waiting:
            while waiting:
                granted, _ = waiting.popitem(last=False)
                if not granted.done():
                    granted.set_result(None)
                    return
        self._free += 1
