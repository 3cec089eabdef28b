"""Drained messages, kept until the decode worker has acknowledged them.

A decode worker keeps slots in quarantine until it has acted on the message. A message is sent at once if a stream is open,
on every later stream, and about once a second while one stays open. Quarantine outlives the worker's epochs, so messages
are kept per worker; if no hand-off opens a stream to it, one is opened for them. After TRIES failures no more streams are
opened, but the messages stay: a worker that was stopped or cut off for an hour still has the slots in quarantine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster import errors
from cluster.background_tasks import BackgroundTasks
from wire import common_pb2

log = logging.getLogger(__name__)
MAX_WAITING = 4096  # of one worker
MAX_TOGETHER = 256  # sent at a time: a stream's queue is bounded, and has other messages too
MAX_GIVEN_UP = 256  # unreachable workers; most have ended, and their slots with them
TRIES = 30
TRY_SECONDS = 1.0


class DrainNoticeStream(Protocol):
    def send_drained(self, transfer_id: bytes) -> None: ...


Open = Callable[[common_pb2.WorkerRef], Awaitable[DrainNoticeStream]]


class PendingDrainNotices:
    def __init__(
        self,
        open_stream: Open,
        current_epoch: Callable[[common_pb2.WorkerRef], int],
        key: Callable[[common_pb2.WorkerRef], str] = lambda decode: decode.worker_id,
    ):
        """`open_stream` returns an open stream or raises BatonError; `current_epoch` is the worker's last known one, 0 if
        it is not known; messages of workers with the same `key` are one worker's."""
        self._open = open_stream
        self._current_epoch = current_epoch
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, dict[bytes, float]] = {}  # time of the last sending, oldest first
        self._delivering: set[str] = set()
        self._answered: set[str] = set()  # workers that have acknowledged a message since the last try
        self._given_up: dict[str, None] = {}  # oldest first
        self._background_tasks = BackgroundTasks()

    def keep(
        self, decode: common_pb2.WorkerRef, transfer_id: bytes, stream: DrainNoticeStream | None = None
    ) -> None:
        """Keep a message until it is acknowledged; if `stream` is given, send it there at once."""
        waiting = self._waiting.setdefault(self._key(decode), {})
        if stream is None:
            waiting[transfer_id] = -TRY_SECONDS
        else:
            self._send(waiting, transfer_id, stream)
        while len(waiting) > MAX_WAITING:
            del waiting[next(iter(waiting))]
        self._start(decode, at_once=stream is None)

    def acknowledged(self, key: str, transfer_id: bytes) -> None:
        """Drop the message: the worker has acted on it."""
        waiting = self._waiting.get(key, {})
        if waiting.pop(transfer_id, None) is None:
            return
        self._answered.add(key)
        if not waiting:
            self._forget(key)

    def hand_over(self, decode: common_pb2.WorkerRef, stream: DrainNoticeStream) -> None:
        """Send all waiting messages on a stream that was just opened."""
        key = self._key(decode)
        self._given_up.pop(key, None)
        if key in self._waiting:
            self._repeat(key, stream, self._loop.time())
            self._start(decode, at_once=False)

    def waits_for(self, key: str) -> bool:
        return key in self._waiting

    def close(self) -> None:
        """Drop all messages: the exit of this process is the same proof."""
        self._waiting.clear()

    # --- until it is acknowledged -------------------------------------------------------------------------

    def _send(self, waiting: dict[bytes, float], transfer_id: bytes, stream: DrainNoticeStream) -> None:
        waiting.pop(transfer_id, None)
        waiting[transfer_id] = self._loop.time()
        stream.send_drained(transfer_id)

    def _repeat(self, key: str, stream: DrainNoticeStream, sent_before: float) -> None:
        waiting = self._waiting.get(key, {})
        due = [transfer_id for transfer_id, sent in waiting.items() if sent <= sent_before]
        for transfer_id in due[:MAX_TOGETHER]:
            self._send(waiting, transfer_id, stream)

    def _start(self, decode: common_pb2.WorkerRef, *, at_once: bool) -> None:
        key = self._key(decode)
        if key not in self._delivering:
            self._given_up.pop(key, None)
            self._delivering.add(key)
            self._background_tasks.spawn(self._deliver(decode, at_once))

    async def _deliver(self, decode: common_pb2.WorkerRef, at_once: bool) -> None:
        """Repeat the messages until they are acknowledged or TRIES is reached.

        Logs the first failure and the end, not every try. A stream counts as one try however long it stays open; an
        acknowledgement starts the count again.
        """
        key, failed, failures = self._key(decode), False, 0
        last: DrainNoticeStream | None = None
        try:
            while True:
                if not at_once:
                    await asyncio.sleep(TRY_SECONDS)
                at_once = False
                if key not in self._waiting:
                    break
                if key in self._answered:
                    self._answered.discard(key)
                    failures = 0
                if failures >= TRIES:
                    break
                try:
                    async with asyncio.timeout(TRY_SECONDS):
                        stream = await self._open(decode)
                    failures += stream is not last
                    last = stream
                    self._repeat(key, stream, self._loop.time() - TRY_SECONDS)
                except (errors.BatonError, TimeoutError) as error:
                    failures += 1
                    if not failed:
                        log.info("sending Drained to %s failed, retrying: %s", key, _reason(error))
                    failed = True
                    decode = self._under_current_epoch(decode)
        finally:
            self._delivering.discard(key)
            self._answered.discard(key)
        self._log_end(key, failed)

    def _log_end(self, key: str, failed: bool) -> None:
        left = len(self._waiting.get(key, ()))
        if left:
            log.info(
                "%s has not acknowledged %d Drained messages, which wait for its next stream",
                key,
                left,
            )
            self._give_up(key)
        elif failed:
            log.info("%s has acknowledged all Drained messages", key)

    def _give_up(self, key: str) -> None:
        """Open no more streams for the worker's messages; the next hand-off's stream carries them."""
        self._given_up[key] = None
        while len(self._given_up) > MAX_GIVEN_UP:
            self._forget(next(iter(self._given_up)))

    def _forget(self, key: str) -> None:
        self._given_up.pop(key, None)
        self._waiting.pop(key, None)

    def _under_current_epoch(self, decode: common_pb2.WorkerRef) -> common_pb2.WorkerRef:
        epoch = self._current_epoch(decode)
        if not epoch or epoch == decode.epoch:
            return decode
        return common_pb2.WorkerRef(worker_id=decode.worker_id, epoch=epoch, address=decode.address)


def _reason(error: Exception) -> str:
    return str(error) or f"no answer for {TRY_SECONDS:.0f} s"
