"""Work on the event loop that may wait.

A request needs about ten turns of the loop until its first token. Without an order, each of these turns takes as long as
the work on everything that hundreds of other clients have sent meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from cluster.round_robin import RoundRobin
from router.admission.turn_allowance import TurnAllowance

# Of processor time (see TurnAllowance). A step takes up to about 1 ms, so steps lengthen a turn by at most a third.
SECONDS_PER_STEP = 0.004
# Refusals that wait beside each other: a connection of gRPC has hundreds of calls. Further ones are sent at once.
MAX_REFUSALS = 1024


class LowPriority:
    """Steps: 64 KiB of a long body, 256 fields of a long message, or a request without a key. Tenants take turns; those
    of each go in the order of arrival.

    One per turn of the event loop, and another for each 4 ms that the loop computed in the turn before: on a busy loop,
    whose turns are long, one step per turn would read bodies at a few MiB per second.

    The queue is bounded by the requests in flight and the connections, each of which waits for one step at a time.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._allowance = TurnAllowance(SECONDS_PER_STEP, clock=clock)
        # By tenant; clients without a key count as one
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()
        self._refusals = 0  # that wait

    async def step(self, tenant: str = "") -> None:
        """Wait for the caller's turn; its step ends where it awaits something."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._allowance.begin_turn()
            loop.call_soon(self._release)
        turn = loop.create_future()
        self._waiting.push(tenant, turn)
        await turn

    async def refuse(self, tenant: str) -> None:
        """Wait for a step before a request is refused for the number of others: its client may ask again at once."""
        if self._refusals >= MAX_REFUSALS:
            return
        self._refusals += 1
        try:
            await self.step(tenant)
        finally:
            self._refusals -= 1

    def _release(self) -> None:
        steps = self._allowance.next_turn()
        while self._waiting and steps:
            turn = self._waiting.pop()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                steps -= 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._release)
