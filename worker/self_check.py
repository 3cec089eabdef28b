"""Checks the integrity of a worker's accounts while it is under test.

Nothing of this runs outside tests: over a large KV pool a check takes milliseconds, between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.errors import BatonError
from worker.engine_host import EngineHost

POLL_SECONDS = 0.3


class SelfCheck:
    """Runs the role's `check_integrity` on the loop and the engine's on its thread."""

    def __init__(self, host: EngineHost, check_role: Callable[[], None]):
        self._host = host
        self._check_role = check_role
        self._task: asyncio.Task[None] | None = None
        self.count = 0
        self.failure = ""  # of the first check that failed

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self.run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Check until cancelled, the engine stops, or a check fails."""
        while not self.failure:
            await asyncio.sleep(POLL_SECONDS)
            try:
                self._check_role()
                await self._host.call(lambda engine: engine.check_integrity())
            except AssertionError as error:
                self.failure = str(error) or "an account does not add up"
            except BatonError:  # the engine has stopped
                return
            except Exception as error:  # accounts so wrong that they cannot be read
                self.failure = repr(error)
            self.count += 1
