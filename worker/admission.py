"""Whose prompt may enter the engine next: on a prefill worker, and on a decode worker that prefills by itself.

Requests enter by class (high, normal, batch), then in turns that share the worker between tenants by weight, while
the tokens already inside fill less than two steps: one that computes, one that is ready when it ends. More would
reserve KV on decode workers long before it is needed, and settle the order of requests that have only just come. One that
has waited long counts as of the next higher class, where its tenant's weight counts again: no class starves another.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from cluster.errors import DeadlineError
from engine.scheduler.scheduler import AGING_SECONDS
from worker.fair_queue import FairQueue, Waiting

AGED_TOGETHER = 16  # taking one out of a queue costs a step for each that waits in it
CLASSES = ("high", "normal", "batch")


class Admission:
    """Bounds the tokens between `enter` and `leave`. A request larger than the bound enters alone."""

    def __init__(
        self,
        max_tokens: int,
        aging_seconds: float = AGING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._max_tokens = max_tokens
        self._aging_seconds = aging_seconds
        self._clock = clock
        self._inside_tokens = 0
        self._order = itertools.count()
        self._high, self._normal, self._batch = FairQueue(), FairQueue(), FairQueue()
        self._queues = (self._high, self._normal, self._batch)

    @property
    def inside_tokens(self) -> int:
        return self._inside_tokens

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def tokens(self) -> int:
        """Of all that wait or are inside."""
        return self._inside_tokens + sum(queue.tokens for queue in self._queues)

    def waiting_by_class(self) -> dict[str, int]:
        return dict(zip(CLASSES, map(len, self._queues), strict=True))

    def oldest_seconds(self) -> float:
        """How long the request that came first has waited."""
        arrived = [queue.earliest for queue in self._queues if len(queue)]
        return self._clock() - min(arrived) if arrived else 0.0

    async def enter(
        self, tokens: int, priority: int, timeout_seconds: float, tenant: str = "", weight: float = 1.0
    ) -> int:
        """Wait for a turn. `priority`: above 0 is high, 0 normal, below batch.

        Returns the priority to compute it with: that of its class, which is a higher one if it has waited long. Raises
        DeadlineError; then nothing was taken.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now, weight = self._clock(), weight if weight > 0 else 1.0
        waiting = Waiting(
            max(1, tokens), tenant, weight, now, next(self._order), turn, queued=now, priority=priority
        )
        self._queue_of(priority).push(waiting)
        self._admit()
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn
        except TimeoutError:
            self._give_back(waiting)
            raise DeadlineError(
                f"queued for {timeout_seconds:.1f} s without a turn: prefill is behind",
                field="admission_deadline",
            ) from None
        except asyncio.CancelledError:
            self._give_back(waiting)
            raise
        finally:
            turn.cancel()
            self._remove(waiting)
        return waiting.priority

    def leave(self, tokens: int) -> None:
        self._inside_tokens -= max(1, tokens)
        self._admit()

    def _give_back(self, waiting: Waiting) -> None:
        """It may have been admitted and ended in the same moment."""
        if waiting.turn.done() and not waiting.turn.cancelled():
            self.leave(waiting.tokens)

    def _queue_of(self, priority: int) -> FairQueue:
        return self._high if priority > 0 else self._batch if priority < 0 else self._normal

    def _remove(self, waiting: Waiting) -> None:
        """Who has given up: the next in line may fit where it did not."""
        if any(queue.remove(waiting) for queue in self._queues):
            self._admit()

    def _admit(self) -> None:
        self._age()
        while (queue := next((one for one in self._queues if len(one)), None)) is not None:
            tokens = queue.first.tokens
            if self._inside_tokens and self._inside_tokens + tokens > self._max_tokens:
                return
            waiting = queue.pop()
            if not waiting.turn.done():
                self._inside_tokens += tokens
                waiting.turn.set_result(None)

    def _age(self) -> None:
        """Requests that have waited long in their class take their places in the next higher one."""
        now = self._clock()
        for queue, higher in ((self._normal, self._high), (self._batch, self._normal)):
            for _ in range(AGED_TOGETHER):
                if not len(queue) or queue.oldest.queued > now - self._aging_seconds:
                    break
                waiting = queue.oldest
                queue.remove(waiting)
                waiting.queued, waiting.priority = now, 0 if queue is self._batch else 1
                higher.push(waiting)

    def check_integrity(self) -> None:
        """Of every queue; no request waits where there is room."""
        for queue in self._queues:
            queue.check_integrity()
        assert self._inside_tokens >= 0
        assert self._inside_tokens or not self.waiting
