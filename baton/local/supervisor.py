"""Restarts processes that have exited, after growing pauses, until one has exited too often in a row.

running ──exits──► waiting (cluster/process/restarts.py) ──► running
   └── too many short lives in a row ──► given up
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.local.children import REAP_SECONDS, Child
from cluster.errors import SetupError
from cluster.process.restarts import MAX_SHORT_LIVES, SHORT_LIFE_SECONDS, Restarts


@dataclass
class SupervisedProcess:
    """A supervised process. Without `restart` its end is only reported."""

    child: Child
    restart: Callable[[], Child] | None
    on_gone: Callable[[Child], None]
    on_exit: Callable[[Child], None]
    served: Callable[[Child], bool]
    started: float
    restarts: Restarts = field(default_factory=Restarts)
    due: float | None = None  # time of the restart; None while it runs or after giving up
    given_up: bool = False
    # Exited children with processes left in their sessions
    lingering: list[Child] = field(default_factory=list)


class Supervisor:
    """Call `check` regularly, from the thread that started the children: they are killed when that thread ends.

    `on_exit` is called when a child has exited, `on_gone` when no process of its session is left, which may be later.
    `served` returns whether a child that has exited was ever ready.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._supervised: list[SupervisedProcess] = []

    def add(
        self,
        child: Child,
        restart: Callable[[], Child] | None = None,
        on_gone: Callable[[Child], None] = lambda child: None,
        on_exit: Callable[[Child], None] = lambda child: None,
        served: Callable[[Child], bool] = lambda child: True,
    ) -> None:
        self._supervised.append(SupervisedProcess(child, restart, on_gone, on_exit, served, self._clock()))

    @property
    def children(self) -> list[Child]:
        return [entry.child for entry in self._supervised]

    def check(self) -> list[str]:
        """Restart what is due. Returns what happened since the last call, as messages for the user."""
        said: list[str] = []
        for entry in self._supervised:
            entry.lingering = [child for child in entry.lingering if not self._reaped(entry, child, 0.0)]
            if entry.due is None and not entry.given_up and entry.child.exit_code() is not None:
                said.append(self._exited(entry))
            if entry.due is not None and self._clock() >= entry.due:
                said.append(self._start_again(entry))
        return said

    def _exited(self, entry: SupervisedProcess) -> str:
        child, now = entry.child, self._clock()
        if not self._reaped(entry, child, REAP_SECONDS):
            entry.lingering.append(child)
        entry.on_exit(child)
        line = f"{child.name} exited with code {child.exit_code()}"
        if entry.restart is None:
            entry.given_up = True
            return line
        pause = entry.restarts.pause_after(now - entry.started, served=entry.served(child))
        if pause is None:
            entry.given_up = True
            why = f"{MAX_SHORT_LIVES} exits in a row within {SHORT_LIFE_SECONDS:.0f} s or before it was ready"
            return f"{line}; given up: {why}; its log: {child.log}"
        entry.due = now + pause
        return f"{line}; starting again in {pause:.1f} s"

    def _reaped(self, entry: SupervisedProcess, child: Child, seconds: float) -> bool:
        gone = child.reap(seconds)
        if gone:  # a worker's ranks are in its session; until they have ended, their writes may land
            entry.on_gone(child)
        return gone

    def _start_again(self, entry: SupervisedProcess) -> str:
        assert entry.restart is not None, "due says so"
        entry.started = self._clock()
        try:
            entry.child = entry.restart()
        except (SetupError, OSError) as error:  # a full disk or too many processes: may be temporary
            pause = entry.restarts.pause_after_failed_start()
            entry.given_up = pause is None
            entry.due = None if pause is None else self._clock() + pause
            return f"{entry.child.name} does not start: {error}"
        entry.due = None
        return f"{entry.child.name} started again"
