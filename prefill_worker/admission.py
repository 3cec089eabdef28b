"""Who may enter the prefill engine next.

Requests enter in order of priority, then arrival, while the tokens already inside fill less than two steps: one
that computes, one that is ready when it ends. More would reserve KV on decode workers long before it is needed.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools

from cluster.errors import DeadlineError


class Admission:
    """Bounds the tokens between `enter` and `leave`. A request larger than the bound enters alone."""

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._inside_tokens = 0
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []

    @property
    def inside_tokens(self) -> int:
        return self._inside_tokens

    @property
    def waiting(self) -> int:
        return sum(not future.done() for *_, future in self._waiting)

    async def enter(self, tokens: int, priority: int, timeout_seconds: float) -> None:
        """Waits for a turn. Raises DeadlineError; then nothing was taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (-priority, next(self._order), tokens, turn))
        self._admit()
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn
        except TimeoutError:
            raise DeadlineError(
                f"queued for {timeout_seconds:.1f} s without a turn: the prefill workers are behind",
                field="admission_deadline",
            ) from None
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(tokens)  # admitted and cancelled in the same moment
            raise
        finally:
            turn.cancel()

    def leave(self, tokens: int) -> None:
        self._inside_tokens -= tokens
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            _, _, tokens, turn = self._waiting[0]
            if not turn.done():
                if self._inside_tokens and self._inside_tokens + tokens > self._max_tokens:
                    return
                self._inside_tokens += tokens
                turn.set_result(None)
            heapq.heappop(self._waiting)
