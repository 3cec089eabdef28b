"""Orders the prompts that wait for the engine, on a prefill worker and for local prefill on a decode worker.

Requests enter by class (high, normal, batch), then in turns that share the worker between tenants by weight, while the
tokens inside fill less than two steps: the one in progress and the next. More would reserve KV on decode workers long
before it is needed, and fix the order of requests too early. A request that has waited long moves to the next higher
class, where its tenant's weight applies again, if its tenant has had no turn in its class meanwhile: no class starves
another, and a tenant's backlog of a lower class does not outrank the requests of others.

A prompt of more than two steps enters alone, and is inside for all of its steps. Beside it a tenant with nothing inside
enters with its first request, while those beside it fill less than two steps: the engine keeps a part of each step for
them (engine/scheduler/scheduler.py). A tenant's long prompts cost another one a step, not a prompt.

At a decode worker the prompts inside may belong to a tenant whose other requests fill the batch, or hold the KV blocks:
they wait as long as those run, where the engine has extra seats and blocks for other tenants. So while it is full, a
tenant with nothing inside enters beyond the bound.

Requests whose grammar is compiled in their turn have a bound of their own, of the same size: compiles go one by one, and
those that wait for them keep no other request out. Not earlier: a request holds its compiled grammar, and the queue has no
bound of their memory.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable

from cluster.errors import DeadlineError
from cluster.fair_queue import FairQueue, Waiting
from cluster.protocol.priority import PriorityClass, class_of
from engine.scheduler.aging import AGING_SECONDS

AGED_TOGETHER = 16  # per admission, and class: hundreds at once would hold up the event loop
CLASSES: tuple[PriorityClass, ...] = ("high", "normal", "batch")  # in the order of admission


class Admission:
    """Bounds the tokens between `enter` and `leave`. A request larger than the bound enters without another one inside.

    `engine_full`: whether the engine gives no seats, or no blocks, to tenants that have some; call `look` when that may
    have changed.
    """

    def __init__(
        self,
        max_tokens: int,
        aging_seconds: float = AGING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        engine_full: Callable[[], bool] = lambda: False,
    ):
        self._max_tokens = max_tokens
        self._aging_seconds = aging_seconds
        self._clock = clock
        self._engine_full = engine_full
        self._inside_tokens = 0
        self._inside: Counter[str] = Counter()  # tokens by tenant
        self._order = itertools.count()
        self._high, self._normal, self._batch = FairQueue(clock), FairQueue(clock), FairQueue(clock)
        self._queues = (self._high, self._normal, self._batch)

    @property
    def inside_tokens(self) -> int:
        return self._inside_tokens

    @property
    def waiting(self) -> int:
        return sum(len(queue) for queue in self._queues)

    @property
    def tokens(self) -> int:
        """Tokens of all requests that wait or are inside."""
        return self._inside_tokens + sum(queue.tokens for queue in self._queues)

    def waiting_by_class(self) -> dict[str, int]:
        return dict(zip(CLASSES, map(len, self._queues), strict=True))

    def oldest_seconds(self) -> float:
        """How long the oldest request has waited. Any thread."""
        arrived = [earliest for queue in self._queues if (earliest := queue.earliest()) is not None]
        return self._clock() - min(arrived) if arrived else 0.0

    async def enter(
        self, tokens: int, priority: int, timeout_seconds: float, tenant: str = "", weight: float = 1.0
    ) -> int:
        """Wait for a turn in the class of `priority` (cluster/protocol/priority.py).

        Returns the priority to compute it with: that of its class, a higher one after a long wait. Raises DeadlineError;
        then no tokens are inside for it.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        now, weight = self._clock(), weight if weight > 0 else 1.0
        waiting = Waiting(
            max(1, tokens), tenant, weight, now, next(self._order), turn, queued=now, priority=priority
        )
        self._queue_of(priority).push(waiting)
        try:
            self._admit()
            async with asyncio.timeout(timeout_seconds):
                await turn
        except TimeoutError:
            self._release(waiting)
            raise DeadlineError(
                f"queued for {max(0.0, timeout_seconds):.1f} s without a turn: prefill is behind",
                field="admission_deadline",
            ) from None
        except asyncio.CancelledError:
            self._release(waiting)
            raise
        finally:
            turn.cancel()
            self._remove(waiting)
        return waiting.priority

    def leave(self, tokens: int, tenant: str = "") -> None:
        self._inside_tokens -= max(1, tokens)
        self._inside[tenant] -= max(1, tokens)
        self._inside = +self._inside
        self._admit()

    def look(self) -> None:
        """Admit a tenant with nothing inside if the engine has become full."""
        if any(map(len, self._queues)) and self._engine_full():
            self._admit()

    def _release(self, waiting: Waiting) -> None:
        """A request may be admitted and time out, or be cancelled, in the same turn of the loop."""
        if waiting.turn.done() and not waiting.turn.cancelled():
            self.leave(waiting.tokens, waiting.tenant)

    def _queue_of(self, priority: int) -> FairQueue:
        return self._queues[CLASSES.index(class_of(priority))]

    def _remove(self, waiting: Waiting) -> None:
        """Remove a request that no longer waits; the next one may fit where it did not."""
        if any(queue.remove(waiting) for queue in self._queues):
            self._admit()

    def _admit(self) -> None:
        self._age()
        self._admit_in_order()
        if self.waiting and self._engine_full():
            for queue in self._queues:
                for waiting in queue.pop_others(self._inside):
                    self._let_in(waiting)
            self._admit_in_order()
        elif self.waiting and self._inside_tokens > self._max_tokens:
            self._admit_beside_long_prompt()

    def _admit_beside_long_prompt(self) -> None:
        """Admit tenants with nothing inside, only of the highest class in which one waits."""
        longest = max(self._inside.values())
        beside, asked = self._inside_tokens - longest, False

        def fits(waiting: Waiting) -> bool:
            nonlocal beside, asked
            asked = True
            if beside + waiting.tokens > self._max_tokens:
                return False
            beside += waiting.tokens
            return True

        # Without a long prompt, those that entered while the engine was full are beyond the bound.
        if longest > self._max_tokens and beside < self._max_tokens:
            for queue in self._queues:
                for waiting in queue.pop_others(self._inside, fits):
                    self._let_in(waiting)
                if asked:
                    break

    def _admit_in_order(self) -> None:
        while (queue := next((one for one in self._queues if len(one)), None)) is not None:
            if self._inside_tokens and self._inside_tokens + queue.first.tokens > self._max_tokens:
                return
            self._let_in(queue.pop())

    def _let_in(self, waiting: Waiting) -> None:
        if not waiting.turn.done():
            self._inside_tokens += waiting.tokens
            self._inside[waiting.tenant] += waiting.tokens
            waiting.turn.set_result(None)

    def _age(self) -> None:
        """Move requests that have waited long to the next higher class: one per tenant and class each `aging_seconds`.

        A tenant that takes turns in a class is not starved there: its requests wait behind its own ones.
        """
        now = self._clock()
        for queue, higher in ((self._normal, self._high), (self._batch, self._normal)):
            for _ in range(AGED_TOGETHER):
                waiting = queue.take_aged(now - self._aging_seconds)
                if waiting is None:
                    break
                waiting.queued, waiting.priority = now, 0 if queue is self._batch else 1
                higher.push(waiting)

    def check_integrity(self) -> None:
        """Check every queue, and that no request waits while there is room."""
        for queue in self._queues:
            queue.check_integrity()
        assert self._inside_tokens >= 0
        assert self._inside_tokens or not self.waiting


class Admissions:
    """Two of them: for requests that compile a grammar in their turn (`compiles`), and for all others."""

    def __init__(
        self,
        max_tokens: int,
        aging_seconds: float = AGING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        engine_full: Callable[[], bool] = lambda: False,
    ):
        self._clock = clock
        self.plain = Admission(max_tokens, aging_seconds, clock, engine_full)
        self.compiling = Admission(max_tokens, aging_seconds, clock, engine_full)
        self._both = (self.plain, self.compiling)

    @property
    def inside_tokens(self) -> int:
        return sum(one.inside_tokens for one in self._both)

    @property
    def waiting(self) -> int:
        return sum(one.waiting for one in self._both)

    @property
    def tokens(self) -> int:
        """Tokens of all requests that wait or are inside."""
        return sum(one.tokens for one in self._both)

    def waiting_by_class(self) -> dict[str, int]:
        plain, compiling = (one.waiting_by_class() for one in self._both)
        return {name: plain[name] + compiling[name] for name in CLASSES}

    def oldest_seconds(self) -> float:
        """How long the oldest request has waited. Any thread."""
        return max(one.oldest_seconds() for one in self._both)

    async def enter(
        self,
        tokens: int,
        priority: int,
        timeout_seconds: float,
        tenant: str = "",
        weight: float = 1.0,
        *,
        compiles: Callable[[], bool] = lambda: False,
    ) -> tuple[int, bool]:
        """As Admission.enter; returns also whether the request is counted with those that compile, for `leave`.

        `compiles` is asked again at the request's turn: a compiled grammar may have left the cache since it came. Then it
        waits for a turn among those that compile, in the class that it has by then.
        """
        if not compiles():
            began = self._clock()
            priority = await self.plain.enter(tokens, priority, timeout_seconds, tenant, weight)
            if not compiles():
                return priority, False
            self.plain.leave(tokens, tenant)
            timeout_seconds -= self._clock() - began
        return await self.compiling.enter(tokens, priority, timeout_seconds, tenant, weight), True

    def leave(self, tokens: int, tenant: str = "", *, compiles: bool = False) -> None:
        (self.compiling if compiles else self.plain).leave(tokens, tenant)

    def look(self) -> None:
        for one in self._both:
            one.look()

    def check_integrity(self) -> None:
        for one in self._both:
            one.check_integrity()
