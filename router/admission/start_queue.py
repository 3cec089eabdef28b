"""The order in which requests are started: parsed, tokenised, placed and dispatched.

All of it runs on one event loop, in about ten turns per request. Started as they arrive, the requests that hundreds of
connections send back to back make each of these turns as long as the work on all of them, for every tenant.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from cluster.errors import CancelledError
from cluster.fair_queue import FairQueue, Waiting
from router.admission.turn_allowance import TurnAllowance

# What has been started takes a step in each of the turns that follow, so one request per turn keeps the loop as busy as
# all at once would, and its turns as short as the work on one request.
STARTS_PER_TURN = 1
# Of processor time (see TurnAllowance): a loop that is busy with tokens has long turns.
SECONDS_PER_START = 0.004


class Client(Protocol):
    """One whose end is reported: an HTTP exchange."""

    def watch(self, watcher: StartWait) -> None: ...

    def unwatch(self) -> None: ...


class StartWait:
    """A request that waits for its turn; its client watches it."""

    def __init__(self, turn: asyncio.Future[None]):
        self._turn = turn
        self.client_left = False

    def disconnected(self) -> None:
        self.client_left = True
        if not self._turn.done():
            self._turn.set_result(None)

    def resumed(self) -> None:
        """Nothing is written yet."""


class StartQueue:
    """Lets requests start, one per turn of the event loop: models take turns, of each model tenants by weight, and each
    one's requests go in the order of arrival. A request that comes to a loop which starts no other in this turn does not
    wait.

    The queue is bounded by the requests in flight: a request has its place when it comes here.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._allowance = TurnAllowance(SECONDS_PER_START, STARTS_PER_TURN, clock)
        # By model; the one whose turn is next comes first
        self._queues: OrderedDict[str, FairQueue] = OrderedDict()
        self._order = itertools.count()
        self._left = 0  # starts of this turn
        self._counting = False  # _next_turn will be called

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(map(len, self._queues.values()))

    async def turn(
        self, tenant: str = "", weight: float = 1.0, client: Client | None = None, model: str = ""
    ) -> None:
        """Wait for a request's turn. `model`: of this router; "" = not known yet.

        Raises CancelledError (cluster.errors) if its `client` disconnects meanwhile.
        """
        if not self._counting:
            self._allowance.begin_turn()
            self._call_next_turn()
            self._left = STARTS_PER_TURN
        if self._left and not self._queues:
            self._left -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        weight, watcher = weight if weight > 0 else 1.0, StartWait(turn)
        waiting = Waiting(1, tenant, weight, time.monotonic(), next(self._order), turn)
        self._queues.setdefault(model, FairQueue()).push(waiting)
        try:
            if client is not None:
                client.watch(watcher)
            await turn
            if watcher.client_left:
                raise CancelledError("the client disconnected")
        finally:
            turn.cancel()
            self._remove(model, waiting)
            if client is not None:
                client.unwatch()

    def _call_next_turn(self) -> None:
        self._counting = True
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        started = self._left < STARTS_PER_TURN
        self._left = self._allowance.next_turn()
        while self._left and self._queues:
            waiting = self._next()
            if not waiting.turn.done():  # else it has left, and its task has not run since
                waiting.turn.set_result(None)
                self._left -= 1
                started = True
        if started or self._queues:
            self._call_next_turn()
        else:
            self._counting = False

    def _next(self) -> Waiting:
        model, queue = next(iter(self._queues.items()))
        waiting = queue.pop()
        if queue:
            self._queues.move_to_end(model)
        else:
            del self._queues[model]
        return waiting

    def _remove(self, model: str, waiting: Waiting) -> None:
        queue = self._queues.get(model)
        if queue is not None:
            queue.remove(waiting)
            if not queue:
                del self._queues[model]

    def check_integrity(self) -> None:
        for queue in self._queues.values():
            queue.check_integrity()
            assert queue
        assert self._counting or not self._queues
