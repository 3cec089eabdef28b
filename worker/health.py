"""A worker's phase, and what its probes answer.

LOADING → WARMING_UP → STARTING → SERVING → DRAINING → LEAVING
   └─────────┴────────────┴──────────┴─────────┴──────► LEAVING
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from enum import Enum

from cluster.errors import DrainingError
from cluster.state_machine import StateMachine

log = logging.getLogger(__name__)
TICK_SECONDS = 0.5
WITHOUT_RAY_HEAD = "this worker serves, and is not replaced if it ends"


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

    def __init__(self, worker_id: str, stall_seconds: float, clock: Callable[[], float] = time.monotonic):
        self._worker_id = worker_id
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._ticked = clock()
        self._machine = StateMachine(Phase.LOADING, TRANSITIONS, "worker")
        self._doing = ""
        self._engine_moves: Callable[[], bool] = lambda: True
        self._registered: Callable[[], bool] = lambda: True
        self._ray_head_silent: Callable[[], str] = lambda: ""

    def watch(
        self,
        *,
        engine_moves: Callable[[], bool],
        registered: Callable[[], bool],
        ray_head_silent: Callable[[], str] = lambda: "",
    ) -> None:
        """Include the engine, the registration and Ray's head in the answers; probes are answered before any exists."""
        self._engine_moves, self._registered = engine_moves, registered
        self._ray_head_silent = ray_head_silent

    @property
    def phase(self) -> Phase:
        return self._machine.state

    @property
    def draining(self) -> bool:
        """True while the worker takes nothing new: it drains or leaves."""
        return self.phase in (Phase.DRAINING, Phase.LEAVING)

    def check_accepting(self) -> None:
        """Raises DrainingError while the worker takes nothing new."""
        if self.draining:
            raise DrainingError(f"{self._worker_id} is draining", field="worker", retry_after_seconds=0.05)

    def to(self, phase: Phase) -> None:
        """Change the phase; does nothing if the worker already drains or leaves."""
        if self._machine.may(phase):
            self._doing = ""
            self._machine.to(phase)

    def describe(self, doing: str) -> None:
        """Name what is being done in this phase, for the log and for the answers of the probes. Any thread."""
        log.info("%s", doing)
        self._doing = doing

    async def tick(self) -> None:
        """Record, until cancelled, that the event loop runs."""
        while True:
            self._ticked = self._clock()
            await asyncio.sleep(TICK_SECONDS)

    def why_not_ready(self) -> list[str]:
        doing = self._doing
        why = (
            []
            if self.phase is Phase.SERVING
            else [f"{self.phase.value}: {doing}" if doing else self.phase.value]
        )
        if self.phase is Phase.SERVING and not self._registered():
            why.append("not registered: Redis is out of reach, or has not answered yet")
        return why + self.why_not_live()

    def warnings(self) -> list[str]:
        """Problems that keep no request from being served."""
        silent = self._ray_head_silent()
        return [f"{silent}: {WITHOUT_RAY_HEAD}"] if silent else []

    def why_not_live(self) -> list[str]:
        """A worker that loads is live: a start-up probe bounds how long it may take."""
        if self.phase not in _RUNNING:
            return []
        why = [] if self._engine_moves() else ["the engine has failed, or stands still with work to do"]
        silent = self._clock() - self._ticked
        if silent > self._stall_seconds:
            why.append(f"the event loop has stood still for {silent:.0f} s")
        return why
