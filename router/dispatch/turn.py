"""Calls of one turn of the event loop, made together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from cluster.round_robin import RoundRobin

log = logging.getLogger(__name__)
# Of the loop's processor time: by the clock, calls also take long where other processes want the processor.
SECONDS_PER_TURN = 0.004
CALLS_PER_LOOK = 4  # between two readings of that clock, which take half a microsecond each

Call = Callable[[], None]


class Turn:
    """Collects calls and makes them after what the present turn still has to do, all in one callback of the event loop: of
    hundreds of streams that get a token by one frame, each would need a callback of its own.

    Tenants take turns, and what does not fit into SECONDS_PER_TURN goes on in the next turn of the loop: writing log
    probabilities takes a call about 1 ms, so one tenant's answers would make each turn as long as all of them together.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._calls: RoundRobin[Call] = RoundRobin()
        self._scheduled = False

    def add(self, call: Call, tenant: str = "") -> None:
        if not self._scheduled:
            self._schedule()
        self._calls.push(tenant, call)

    def _schedule(self) -> None:
        self._scheduled = True
        asyncio.get_running_loop().call_soon(self._make)

    def _make(self) -> None:
        calls, self._calls, self._scheduled = self._calls, RoundRobin(), False
        ends = self._clock() + SECONDS_PER_TURN
        for made in range(1, len(calls) + 1):
            call = calls.pop()
            try:
                call()
            except Exception:  # the other calls are of other requests
                log.exception("a call at the end of a turn failed")
            if not made % CALLS_PER_LOOK and calls and self._clock() > ends:
                self._put_back(calls)
                return

    def _put_back(self, left: RoundRobin[Call]) -> None:
        """Before what was added meanwhile."""
        if not self._scheduled:
            self._schedule()
        left.append_all(self._calls)
        self._calls = left
