"""How many TLS handshakes with workers a router process has under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_HANDSHAKES = 16  # each is 1 to 2 ms of processor time
HOLD_SECONDS = 0.25  # a worker that does not answer keeps no others waiting for longer


class Handshakes:
    """Links that broke together, as when this machine's network fails, open again some at a time, in order: all at once,
    each would wait for the work of all others, and none would be welcomed in time."""

    def __init__(self) -> None:
        self._running: set[object] = set()
        self._waiting: deque[tuple[asyncio.Future[None], object]] = deque()  # none while a turn is free

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Wait for a turn, which ends with the block, or after HOLD_SECONDS. Yields the seconds waited."""
        loop, turn = asyncio.get_running_loop(), object()
        began = loop.time()
        try:
            if len(self._running) < MAX_HANDSHAKES:
                self._running.add(turn)
            else:
                its_turn = loop.create_future()
                self._waiting.append((its_turn, turn))
                await its_turn
            timer = loop.call_later(HOLD_SECONDS, self._end, turn)
            try:
                yield loop.time() - began
            finally:
                timer.cancel()
        finally:
            self._end(turn)

    def _end(self, turn: object) -> None:
        self._running.discard(turn)
        while self._waiting and len(self._running) < MAX_HANDSHAKES:
            its_turn, following = self._waiting.popleft()
            if not its_turn.done():  # else it was given up
                self._running.add(following)
                its_turn.set_result(None)
