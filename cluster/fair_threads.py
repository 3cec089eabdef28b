"""Threads that run functions for tenants in turns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cluster.errors import DrainingError
from cluster.round_robin import RoundRobin

T = TypeVar("T")
RETRY_SECONDS = 1.0


class FairThreads:
    """Runs functions on threads, by tenants in rotation: a tenant with many calls delays another's by one call per thread.

    A call that is cancelled before its turn is never run. Once the threads are closed, calls that have not begun and later
    ones raise DrainingError, so that callers retry in another process; running calls finish.
    """

    def __init__(self, threads: int, name: str, nice: int = 0):
        """`nice`: how far below this process's other threads in priority, where the system has that for threads."""
        self._executor = ThreadPoolExecutor(
            threads, thread_name_prefix=name, initializer=_lower_priority, initargs=(nice,)
        )
        self._name = name
        self._closed = False
        self._free = threads
        self._waiting: RoundRobin[asyncio.Future[None]] = RoundRobin()

    async def run(self, tenant: str, function: Callable[..., T], *arguments: object) -> T:
        """Return the function's result, or raise its error. Raises DrainingError once closed."""
        self._check_open()
        await self._turn(tenant)
        self._check_open()  # a turn may come just before the end
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        held = True

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._give_back()

        def ended(set_result: Callable[[Any], None], value: object) -> None:
            # The turn ends with the function, even if the caller was cancelled: until then the thread is busy.
            give_back()
            if not result.done():
                set_result(value)

        def work() -> None:
            if result.cancelled():  # while it waited for its thread
                call_on(loop, give_back)
                return
            try:
                value = function(*arguments)
            except BaseException as error:
                call_on(loop, ended, result.set_exception, error)
            else:
                call_on(loop, ended, result.set_result, value)

        try:
            self._executor.submit(work)
        except RuntimeError:  # no further thread can be started now
            result.cancel()  # a thread that is there may take the call, and drops it
            give_back()
            raise
        return await result

    def close(self) -> None:
        """Call it on the event loop. Waiting calls fail at once."""
        self._closed = True
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():
                turn.set_exception(self._refusal())
        self._executor.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._closed:
            raise self._refusal()

    def _refusal(self) -> DrainingError:
        return DrainingError("this process is shutting down", retry_after_seconds=RETRY_SECONDS)

    async def _turn(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push(tenant, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(tenant, turn)  # unless _give_back has dropped it
            else:  # cancelled after it got its turn
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.pop()
            if not turn.done():  # else it was cancelled, and its task has not run since
                turn.set_result(None)
                return
        self._free += 1


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    """Call it on the loop, from another thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *arguments)


def _lower_priority(nice: int) -> None:
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may deny it
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
