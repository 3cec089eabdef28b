"""The attempts of a worker by transfer id.

How long one waits for its router, and when it is forgotten: worker/link/handle.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from cluster.background_tasks import BackgroundTasks
from cluster.errors import OverloadedError, StaleTransferError
from cluster.protocol.times import DETACH_SECONDS
from wire import common_pb2
from worker.attempt_log import AttemptLog
from worker.link.handle import Handle, key_of
from worker.link.routers import Routers

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
    """Live attempts by transfer id, and the handles by which routers read them."""

    def __init__(
        self,
        *,
        cancel: Callable[[A], Awaitable[None]],
        cancel_by_router: Callable[[bytes], Awaitable[object]],
        max_attempts: int,
        credited: Callable[[A], None] = lambda attempt: None,
        detach_seconds: float = DETACH_SECONDS,
    ):
        """`cancel` ends an attempt. `cancel_by_router` does so for a router, present or gone, and returns when the
        attempt's blocks and staging are free. `credited`: its router has taken tokens."""
        self._cancel = cancel
        self._max_attempts = max_attempts
        self._credited = credited
        self._live: dict[bytes, A] = {}
        self._handles: dict[bytes, Handle] = {}
        self._adapters: dict[bytes, str] = {}  # digests, of those that have one
        self._ended = EndedAttempts()
        self._background_tasks = BackgroundTasks()
        self.routers = Routers(
            cancel=cancel_by_router,
            forget=self.forget,
            credited=self._on_credit,
            detach_seconds=detach_seconds,
        )

    def __len__(self) -> int:
        return len(self._live)

    def all(self) -> list[A]:
        """A copy: attempts may end while it is iterated."""
        return list(self._live.values())

    def get(self, transfer_id: bytes) -> A | None:
        return self._live.get(transfer_id)

    def adapters_held(self) -> set[str]:
        """Digests of their adapters."""
        return set(self._adapters.values())

    def refuse_ended(self, transfer_id: bytes) -> None:
        """Raises StaleTransferError if the attempt is over."""
        if transfer_id in self._ended:
            raise StaleTransferError(f"attempt {transfer_id.hex()} has ended", field="transfer_id")

    def is_ended(self, transfer_id: bytes) -> bool:
        return transfer_id in self._ended

    def open(
        self,
        transfer_id: bytes,
        reference: common_pb2.HandleRef,
        spec: common_pb2.GenerateSpec,
        make: Callable[[AttemptLog], A],
    ) -> A:
        """Make an attempt at `spec` with its log, which the router reads by the handle `reference`.

        Raises StaleTransferError (it is over, or under way), InvalidRequestError (the handle) or OverloadedError (the
        worker's queue is full).
        """
        self.refuse_ended(transfer_id)
        if transfer_id in self._live:
            raise StaleTransferError(f"attempt {transfer_id.hex()} is under way", field="transfer_id")
        if len(self._live) >= self._max_attempts:
            raise OverloadedError(
                f"this worker already has {self._max_attempts} requests; try again shortly",
                limit=str(self._max_attempts),
                retry_after_seconds=1.0,
            )
        key = key_of(reference)
        self.routers.check_free(key)
        handle = Handle(key, transfer_id, spec)
        attempt = make(handle.log)
        self._live[transfer_id] = attempt
        self._handles[transfer_id] = handle
        if spec.adapter:
            self._adapters[transfer_id] = spec.adapter
        self.routers.open(handle)
        return attempt

    def forget(self, transfer_id: bytes) -> None:
        """Forget the attempt; its transfer id is refused from now on."""
        if (attempt := self._live.pop(transfer_id, None)) is not None:
            attempt.log.release_room()
            self._ended.add(transfer_id)
            self._adapters.pop(transfer_id, None)
            self.routers.closed(self._handles.pop(transfer_id))

    def remember_ended(self, transfer_id: bytes) -> None:
        """Refuse this transfer id from now on, also if it was never seen."""
        self._ended.add(transfer_id)

    async def cancel(self, attempt: A) -> None:
        """End the attempt and forget it. Completed also if the caller hangs up."""
        await self._background_tasks.complete(self._cancel_and_forget(attempt))

    async def cancel_all(self) -> None:
        """Cancel and forget every current attempt; a failure to cancel one does not stop the others. All at once: the
        engine is called between two steps, so that one by one each would take a step."""
        await asyncio.gather(*map(self._try_to_cancel, self.all()))

    async def _try_to_cancel(self, attempt: A) -> None:
        try:
            await self._cancel_and_forget(attempt)
        except Exception:
            log.exception("attempt %s could not be cancelled", attempt.transfer_id.hex())

    async def close(self) -> None:
        """Cancel the attempts that are left."""
        await self.cancel_all()
        await self._background_tasks.wait(5.0)
        await self.routers.close(5.0)

    def _on_credit(self, transfer_id: bytes) -> None:
        attempt = self._live.get(transfer_id)
        if attempt is not None:
            self._credited(attempt)

    async def _cancel_and_forget(self, attempt: A) -> None:
        try:
            if not attempt.log.ended:
                await self._cancel(attempt)
        finally:
            self.forget(attempt.transfer_id)
