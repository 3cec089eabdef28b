"""When the sessions of an open loop are due, in seconds since the run began, and a pacer that keeps to it."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from itertools import islice, takewhile

from loadgen.config import Arrival, LoadConfig
from loadgen.target import Clock


def offsets(arrival: Arrival, rate: float, random_source: random.Random) -> Iterator[float]:
    """Endless times. `constant` is evenly spaced, `poisson` has exponential gaps; both start with a gap."""
    now = 0.0
    while True:
        now += 1.0 / rate if arrival == "constant" else random_source.expovariate(rate)
        yield now


def session_schedule(config: LoadConfig) -> list[float]:
    """Sessions start at `rate` / turns, so that requests arrive at `rate` in the long run. The seed decides the times."""
    assert config.rate is not None
    source = random.Random(f"schedule {config.seed}")
    times = offsets(config.arrival, config.rate / config.session_turns, source)
    if config.requests is not None:
        return list(islice(times, math.ceil(config.requests / config.session_turns)))
    seconds = config.seconds or 0.0
    return list(takewhile(lambda at: at < seconds, times))


class Pacer:
    """`async for due in pacer` yields each time of the schedule when it is due.

    An event loop rounds its timers to whole milliseconds, about as much as a router adds to a request. A thread that
    sleeps until the time and then wakes the loop is ten times as exact.
    """

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
