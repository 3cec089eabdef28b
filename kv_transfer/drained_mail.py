"""Drained messages whose decode worker could not be told at once.

It keeps slots in doubt, and grants us nothing, until it hears. Its doubt outlives its epochs, so messages are kept by
worker; where no other hand-off opens a stream to it, one is opened for them. That is given up after a while, the
messages are not: a worker that was stopped, or cut off, for an hour still has the slots in doubt when it is back.
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
MAX_GIVEN_UP = 256  # workers that could not be reached; most are gone for good, and their end is a fence
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
        self._given_up: dict[str, None] = {}  # the longest first
        self._follow_ups = FollowUps()

    def keep(self, decode: common_pb2.WorkerRef, transfer_id: bytes) -> None:
        self._waiting.setdefault(decode.worker_id, deque(maxlen=MAX_WAITING)).append(transfer_id)
        if decode.worker_id not in self._delivering:
            self._given_up.pop(decode.worker_id, None)
            self._delivering.add(decode.worker_id)
            self._follow_ups.spawn(self._deliver(decode))

    def hand_over(self, worker_id: str, stream: Stream) -> None:
        """The stream is up: it says what waits, however long it has."""
        self._given_up.pop(worker_id, None)
        for transfer_id in self._waiting.pop(worker_id, ()):
            stream.say_drained(transfer_id)

    async def _deliver(self, decode: common_pb2.WorkerRef) -> None:
        """Says so when it fails for the first time, and how it ended then; not at every try."""
        worker_id, failed, in_vain = decode.worker_id, False, 0
        try:
            while self._waiting.get(worker_id) and in_vain < TRIES:
                try:
                    await self._try(decode)
                except (errors.BatonError, TimeoutError) as error:
                    if not failed:
                        log.info("%s has not heard yet what is drained: %s", worker_id, _words(error))
                    failed = True
                    decode = self._as_it_is_now(decode)
                in_vain += bool(self._waiting.get(worker_id))
                await asyncio.sleep(TRY_SECONDS)
            if left := self._waiting.get(worker_id):
                log.info(
                    "%s was not told of %d drained transfers: not until it is back", worker_id, len(left)
                )
                self._give_up(worker_id)
            elif failed:
                log.info("%s has heard what is drained", worker_id)
        finally:
            self._delivering.discard(worker_id)

    def _give_up(self, worker_id: str) -> None:
        """Whoever opens the next stream to it brings the mail."""
        self._given_up[worker_id] = None
        while len(self._given_up) > MAX_GIVEN_UP:
            oldest = next(iter(self._given_up))
            del self._given_up[oldest]
            self._waiting.pop(oldest, None)

    async def _try(self, decode: common_pb2.WorkerRef) -> None:
        async with asyncio.timeout(TRY_SECONDS):
            stream = await self._open(decode)
        # One that was up before has not asked for what came since.
        self.hand_over(decode.worker_id, stream)

    def _as_it_is_now(self, decode: common_pb2.WorkerRef) -> common_pb2.WorkerRef:
        epoch = self._current_epoch(decode)
        if not epoch or epoch == decode.epoch:
            return decode
        return common_pb2.WorkerRef(worker_id=decode.worker_id, epoch=epoch, address=decode.address)


def _words(error: Exception) -> str:
    return str(error) or f"nothing for {TRY_SECONDS:.0f} s"
