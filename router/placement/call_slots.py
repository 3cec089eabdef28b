"""How many placements of a router Redis is asked for at a time."""

from __future__ import annotations

import asyncio
import itertools
import time

from cluster.fair_queue import FairQueue, Waiting
from cluster.protocol.priority import PriorityClass

# More would wait in Redis instead, where none can be cancelled or passed by a higher class, until all are too late.
MAX_AT_A_TIME = 32
WAIT_SECONDS = 5.0
_RANKS: dict[PriorityClass, int] = {"high": 0, "normal": 1, "batch": 2}


class CallSlots:
    """Waiting placements take turns by class, then by tenant and weight, then by arrival."""

    def __init__(self, most: int = MAX_AT_A_TIME):
        self._free = most
        self._order = itertools.count()
        # By rank. A wait that has ended is removed at once: a low class may get no turn for hours.
        self._waiting = [FairQueue() for _ in _RANKS]

    async def take(self, priority_class: PriorityClass, tenant: str = "", weight: float = 1.0) -> bool:
        """Wait for a slot, to be given back by `give`. Returns False if there is none within WAIT_SECONDS."""
        rank = _RANKS[priority_class]
        if self._free:
            self._free -= 1
            return True
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = Waiting(
            1, tenant, weight if weight > 0 else 1.0, time.monotonic(), next(self._order), granted
        )
        self._waiting[rank].push(waiting)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await granted
        except TimeoutError:
            return self._got(granted)
        except BaseException:
            if self._got(granted):
                self.give()
            raise
        finally:
            self._waiting[rank].remove(waiting)
        return True

    @staticmethod
    def _got(granted: asyncio.Future[None]) -> bool:
        """Granted in the turn in which the wait ended otherwise."""
        return granted.done() and not granted.cancelled()

    def give(self) -> None:
        """Give a slot that was taken to the next placement that waits."""
        for queue in self._waiting:
            while queue:
                granted = queue.pop().turn
                if not granted.done():
                    granted.set_result(None)
                    return
        self._free += 1
