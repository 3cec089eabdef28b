"""Lateness of an event loop's timers: a delay that every request in the process shares."""

from __future__ import annotations

import asyncio

from cluster.telemetry.metrics import process

POLL_SECONDS = 0.25


class LoopLag:
    def __init__(self) -> None:
        self.seconds = process.EVENT_LOOP_LAG.create()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(POLL_SECONDS, self._look, loop, loop.time() + POLL_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.seconds.observe(max(0.0, loop.time() - due))
        self.start()
