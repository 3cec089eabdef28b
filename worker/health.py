"""A worker's phase, and what its probes answer.

LOADING → WARMING_UP → STARTING → SERVING → DRAINING → LEAVING
   └─────────┴────────────┴──────────┴─────────┴──────► LEAVING
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from cluster.state_machine import StateMachine

TICK_SECONDS = 0.5


class Phase(Enum):
    LOADING = "the model is being loaded"
    WARMING_UP = "the model is being warmed up"
    STARTING = "the server is starting"
    SERVING = "serving"
    DRAINING = "draining: it takes nothing new"
    LEAVING = "leaving"


_END = frozenset({Phase.LEAVING})
TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.LOADING: _END | {Phase.WARMING_UP},
    Phase.WARMING_UP: _END | {Phase.STARTING},
    Phase.STARTING: _END | {Phase.SERVING, Phase.DRAINING},
    Phase.SERVING: _END | {Phase.DRAINING},
    Phase.DRAINING: _END,
}
_RUNNING = frozenset({Phase.SERVING, Phase.DRAINING})


class Health:
    """Written on the worker's loop, read on the probes' threads."""

    def __init__(self, stall_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._ticked = clock()
        self._machine = StateMachine(Phase.LOADING, TRANSITIONS, "worker")
        self.engine_moves: Callable[[], bool] = lambda: True
        self.registered: Callable[[], bool] = lambda: True

    @property
    def phase(self) -> Phase:
        return self._machine.state

    @property
    def draining(self) -> bool:
        """Also while it leaves: nothing new is taken."""
        return self.phase in (Phase.DRAINING, Phase.LEAVING)

    def to(self, phase: Phase) -> None:
        """A worker that drains or leaves already goes on with that."""
        if self._machine.may(phase):
            self._machine.to(phase)

    async def tick(self) -> None:
        """Until cancelled: shows that the event loop turns."""
        while True:
            self._ticked = self._clock()
            await asyncio.sleep(TICK_SECONDS)

    def why_not_ready(self) -> list[str]:
        why = [] if self.phase is Phase.SERVING else [self.phase.value]
        if self.phase is Phase.SERVING and not self.registered():
            why.append("not registered: Redis is out of reach, or has not been asked yet")
        return why + self.why_not_live()

    def why_not_live(self) -> list[str]:
        """Loading is no fault: a start-up probe bounds how long it may take."""
        if self.phase not in _RUNNING:
            return []
        why = [] if self.engine_moves() else ["the engine has failed, or stands still with work to do"]
        silent = self._clock() - self._ticked
        if silent > self._stall_seconds:
            why.append(f"the event loop has stood still for {silent:.0f} s")
        return why
