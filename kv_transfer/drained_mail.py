"""Drained messages whose decode worker could not be told at once.

It keeps slots in doubt, and grants us nothing, until it hears. Its doubt outlives its epochs, so messages are kept by
worker; where no other hand-off opens a stream to it, one is opened for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster import errors
from cluster.follow_ups import FollowUps
from wire import common_pb2

log = logging.getLogger(__name__)
MAX_WAITING = 4096  # of one worker
TRIES = 30
TRY_SECONDS = 1.0


class Stream(Protocol):
    def say_drained(self, transfer_id: bytes) -> None: ...


Open = Callable[[common_pb2.WorkerRef], Awaitable[Stream]]


class DrainedMail:
    def __init__(self, open_stream: Open, current_epoch: Callable[[common_pb2.WorkerRef], int]):
        """`open_stream` makes sure of a stream or raises BatonError; `current_epoch` is the one the worker last
        said it lives under, 0 if it said none."""
        self._open = open_stream
        self._current_epoch = current_epoch
        self._waiting: dict[str, deque[bytes]] = {}
        self._delivering: set[str] = set()
        self._follow_ups = FollowUps()

    def keep(self, decode: common_pb2.WorkerRef, transfer_id: bytes) -> None:
        self._waiting.setdefault(decode.worker_id, deque(maxlen=MAX_WAITING)).append(transfer_id)
        if decode.worker_id not in self._delivering:
            self._delivering.add(decode.worker_id)
            self._follow_ups.spawn(self._deliver(decode))

    def hand_over(self, worker_id: str, stream: Stream) -> None:
        """The stream is up: it says what waits."""
        for transfer_id in self._waiting.pop(worker_id, ()):
            stream.say_drained(transfer_id)

    async def _deliver(self, decode: common_pb2.WorkerRef) -> None:
        try:
            for _ in range(TRIES):
                if not self._waiting.get(decode.worker_id):
                    return
                decode = await self._try(decode)
                await asyncio.sleep(TRY_SECONDS)
            # It has been gone for so long that its own end is the fence.
            self._waiting.pop(decode.worker_id, None)
        finally:
            self._delivering.discard(decode.worker_id)

    async def _try(self, decode: common_pb2.WorkerRef) -> common_pb2.WorkerRef:
        """The worker as it names itself now."""
        try:
            async with asyncio.timeout(TRY_SECONDS):
                stream = await self._open(decode)
            # One that was up before has not asked for what came since.
            self.hand_over(decode.worker_id, stream)
        except (errors.BatonError, TimeoutError) as error:
            log.info("%s has not heard yet what is drained: %s", decode.worker_id, error)
            epoch = self._current_epoch(decode)
            if epoch and epoch != decode.epoch:
                return common_pb2.WorkerRef(worker_id=decode.worker_id, epoch=epoch, address=decode.address)
        return decode
