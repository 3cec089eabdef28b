"""The attempts of a worker, and the time limit for those without a reader.

open ──no reader────► detached ──1.5 s──► cancelled
  │ end                  │ reader back
  ▼                      ▼
ended ──end read, or 1.5 s──► forgotten (its transfer id is remembered and refused)

A router's Cancel takes an attempt from any state to forgotten: the router does not read it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from cluster.background_tasks import BackgroundTasks
from cluster.errors import OverloadedError, StaleTransferError
from cluster.protocol.times import DETACH_SECONDS
from wire import common_pb2
from worker.attempt_log import AttemptLog

log = logging.getLogger(__name__)


class EndedAttempts:
    """Transfer ids of ended attempts, kept as long as a late message about them may come: a bounded set with a lifetime.
    `seconds` is the longest admission deadline."""

    def __init__(
        self, seconds: float = 120.0, max_entries: int = 65536, clock: Callable[[], float] = time.monotonic
    ):
        self._seconds = seconds
        self._max_entries = max_entries
        self._clock = clock
        self._ended: OrderedDict[bytes, float] = OrderedDict()

    def add(self, transfer_id: bytes) -> None:
        self._ended[transfer_id] = self._clock() + self._seconds
        self._ended.move_to_end(transfer_id)
        self._drop_old()

    def __contains__(self, transfer_id: bytes) -> bool:
        self._drop_old()
        return transfer_id in self._ended

    def _drop_old(self) -> None:
        now = self._clock()
        while self._ended:
            expires = next(iter(self._ended.values()))
            if expires > now and len(self._ended) <= self._max_entries:
                return
            self._ended.popitem(last=False)


class HasLog(Protocol):
    @property
    def transfer_id(self) -> bytes: ...
    @property
    def log(self) -> AttemptLog: ...


A = TypeVar("A", bound=HasLog)


class Attempts(Generic[A]):
    """Live attempts by transfer id. `cancel` ends one that has lost its reader."""

    def __init__(
        self,
        *,
        cancel: Callable[[A], Awaitable[None]],
        max_attempts: int,
        detach_seconds: float = DETACH_SECONDS,
    ):
        self._cancel = cancel
        self._max_attempts = max_attempts
        self._detach_seconds = detach_seconds
        self._live: dict[bytes, A] = {}
        self._ended = EndedAttempts()
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._background_tasks = BackgroundTasks()

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[A]:
        """A copy: attempts may end while it is iterated."""
        return list(self._live.values())

    def get(self, transfer_id: bytes) -> A | None:
        return self._live.get(transfer_id)

    def refuse_ended(self, transfer_id: bytes) -> None:
        """Raises StaleTransferError if the attempt is over."""
        if transfer_id in self._ended:
            raise StaleTransferError(f"attempt {transfer_id.hex()} has ended", field="transfer_id")

    def is_ended(self, transfer_id: bytes) -> bool:
        return transfer_id in self._ended

    def open(self, attempt: A) -> None:
        """Raises StaleTransferError or OverloadedError (the worker's queue is full)."""
        self.refuse_ended(attempt.transfer_id)
        if len(self._live) >= self._max_attempts:
            raise OverloadedError(
                f"this worker already has {self._max_attempts} requests; try again shortly",
                limit=str(self._max_attempts),
                retry_after_seconds=1.0,
            )
        self._live[attempt.transfer_id] = attempt
        # Its router may be gone before it reads: a worker that was stopped finds such calls when it continues.
        self.expect_reader(attempt)

    async def read(
        self, attempt: A, from_position: int = 0, on_progress: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[common_pb2.AttemptEvent, None]:
        """The attempt's events. If the reader leaves before the end, the detach timer starts."""
        self._stop_timer(attempt.transfer_id)
        try:
            # Closed here, not by the garbage collector: below, its reader must be gone.
            async with contextlib.aclosing(attempt.log.read(from_position, on_progress)) as events:
                async for event in events:
                    yield event
        finally:
            if attempt.log.end_taken:
                self.forget(attempt.transfer_id)
            else:
                self.expect_reader(attempt)

    def expect_reader(self, attempt: A, seconds: float | None = None) -> None:
        """Cancel and forget the attempt unless it is read within `seconds`."""
        if self._live.get(attempt.transfer_id) is not attempt or attempt.log.has_reader:
            return
        self._stop_timer(attempt.transfer_id)
        loop = asyncio.get_running_loop()
        self._timers[attempt.transfer_id] = loop.call_later(
            self._detach_seconds if seconds is None else seconds, self._give_up, attempt
        )

    def forget(self, transfer_id: bytes) -> None:
        self._stop_timer(transfer_id)
        if self._live.pop(transfer_id, None) is not None:
            self._ended.add(transfer_id)

    def remember_ended(self, transfer_id: bytes) -> None:
        """Refuse this transfer id from now on, also if it was never seen."""
        self._ended.add(transfer_id)

    async def cancel(self, attempt: A) -> None:
        """End the attempt and forget it; a reader still gets its end. Completed also if the caller hangs up."""
        await self._background_tasks.complete(self._cancel_and_forget(attempt))

    async def cancel_all(self) -> None:
        """Cancel and end every current attempt; a failure to cancel one does not stop the others."""
        for attempt in self.all():
            try:
                await self._cancel_and_forget(attempt)
            except Exception:
                log.exception("attempt %s could not be cancelled", attempt.transfer_id.hex())

    async def close(self) -> None:
        """Cancel the attempts that are left."""
        for transfer_id in list(self._timers):
            self._stop_timer(transfer_id)
        await self.cancel_all()
        await self._background_tasks.wait(5.0)

    def _give_up(self, attempt: A) -> None:
        self._timers.pop(attempt.transfer_id, None)
        if attempt.log.has_reader:
            return
        self._background_tasks.spawn(self._cancel_and_forget(attempt))

    async def _cancel_and_forget(self, attempt: A) -> None:
        try:
            if not attempt.log.ended:
                await self._cancel(attempt)
        finally:
            self.forget(attempt.transfer_id)

    def _stop_timer(self, transfer_id: bytes) -> None:
        timer = self._timers.pop(transfer_id, None)
        if timer is not None:
            timer.cancel()
