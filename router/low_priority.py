"""Work on the event loop that may wait.

A request needs about ten turns of the loop until its first token. Without an order, each of these turns is as long as
the work on everything that hundreds of other clients sent meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque


class LowPriority:
    """One step per turn of the event loop, in the order of arrival: 64 KiB of a long body, or a request without a key.

    What waits is bounded by the requests in flight and the connections, each of which waits for one step at a time.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def step(self) -> None:
        """Wait until the caller may go on; its step ends where it awaits something."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._release)
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _release(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._release)
