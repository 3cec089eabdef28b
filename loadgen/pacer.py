"""Says when each entry of a schedule is due.

An event loop's own timers are rounded to whole milliseconds, about as much as a router adds to a request. A
thread that sleeps to the moment and then wakes the loop comes ten times closer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from loadgen.target import Clock


class Pacer:
    """`async for due in pacer` yields each time of the schedule when it has come."""

    def __init__(self, schedule: Sequence[float], clock: Clock) -> None:
        self._schedule = schedule
        self._clock = clock
        self._stopped = threading.Event()

    async def __aiter__(self) -> AsyncGenerator[float, None]:
        loop = asyncio.get_running_loop()
        due: asyncio.Queue[float | None] = asyncio.Queue()  # bounded by the schedule

        def post(item: float | None) -> None:
            loop.call_soon_threadsafe(due.put_nowait, item)

        thread = threading.Thread(target=self._pace, args=(post,), name="pacer", daemon=True)
        thread.start()
        try:
            while (item := await due.get()) is not None:
                yield item
        finally:
            self._stopped.set()
            thread.join()

    def _pace(self, post: Callable[[float | None], None]) -> None:
        for at in self._schedule:
            left = at - self._clock()
            if left > 0 and self._stopped.wait(left):
                return
            post(at)
        post(None)
