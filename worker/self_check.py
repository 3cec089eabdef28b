"""A worker that looks after its own books while it is under test.

Outside tests nothing of this runs: over a large KV pool a look takes milliseconds, between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cluster.errors import BatonError
from worker.engine_host import EngineHost

LOOK_SECONDS = 0.3


class SelfCheck:
    """`books`: of the role, on the loop; the engine's are looked at on its thread. `wrong`: the first that was amiss."""

    def __init__(self, host: EngineHost, books: Sequence[Callable[[], None]]):
        self._host = host
        self._books = books
        self.looks = 0
        self.wrong = ""

    async def run(self) -> None:
        """Until it is cancelled, the engine stops, or something is wrong."""
        while not self.wrong:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                for check in self._books:
                    check()
                await self._host.call(lambda engine: engine.check_integrity())
            except AssertionError as error:
                self.wrong = str(error) or "an account does not add up"
            except BatonError:  # the engine has stopped
                return
            except Exception as error:  # books so wrong that they can't even be read
                self.wrong = repr(error)
            self.looks += 1
