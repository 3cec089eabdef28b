"""When each worker last sent something, over all its streams to this router.

Every stream carries a beat each 0.5 s. A worker from which no stream has received anything for 2 s is suspect and gets no
new requests. After 5 s it is lost, for all its streams at once, also those opened later. A stream that alone is silent for
5 s is lost by itself. A lost worker gets no new requests for a while (router/dispatch/backoff.py): during a partition only
the first request should wait for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cluster.protocol.times import LOST_SECONDS, SUSPECT_SECONDS
from router.dispatch.backoff import Backoff

WATCH_SECONDS = 0.1


@dataclass(eq=False)
class Watch:
    """One stream. Call `responded` for everything that arrives on it."""

    worker: _Worker
    on_lost: Callable[[], None]
    on_first: Callable[[], None]
    clock: Callable[[], float]  # the event loop's: get_running_loop would cost a system call per message
    last: float
    answered: bool = False
    paused: bool = False  # it is not read: a slow client is no sign of a lost worker

    def responded(self) -> None:
        self.last = self.worker.last = self.clock()
        if not self.answered:
            self.answered = True
            self.on_first()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.responded()


@dataclass
class _Worker:
    last: float
    watches: list[Watch] = field(default_factory=list)

    def silent_since(self) -> float:
        """When something arrived last; infinity while a stream is not read, on which something may have arrived."""
        return math.inf if any(watch.paused for watch in self.watches) else self.last


class Liveness:
    """`watch` a stream while it is open. Workers are named by their life (worker_id@epoch)."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._lost: Backoff[str] = Backoff(time.monotonic)
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, name: str, on_lost: Callable[[], None]) -> Iterator[Watch]:
        loop = asyncio.get_running_loop()
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = _Worker(loop.time())
        watch = Watch(worker, on_lost, lambda: self._lost.answered(name), loop.time, loop.time())
        worker.watches.append(watch)
        if self._timer is None:
            self._timer = loop.call_later(WATCH_SECONDS, self._look)
        try:
            yield watch
        finally:
            worker.watches.remove(watch)
            if not worker.watches:
                del self._workers[name]

    def silent(self) -> int:
        """How many workers, on whichever thread."""
        since = time.monotonic() - SUSPECT_SECONDS
        return sum(worker.silent_since() < since for worker in list(self._workers.values()))

    def not_reached(self, name: str) -> None:
        """A stream could not be opened. That may have other reasons, but not with one that was lost before."""
        self._lost.failed_again(name)

    @property
    def suspects(self) -> frozenset[str]:
        """Names of workers that have been silent too long for new work, or were lost a moment ago."""
        since = asyncio.get_running_loop().time() - SUSPECT_SECONDS
        silent = [name for name, worker in self._workers.items() if worker.silent_since() < since]
        return self._lost.names().union(silent)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = loop.time() - LOST_SECONDS
        for name, worker in list(self._workers.items()):
            all_lost = worker.silent_since() < late
            for watch in list(worker.watches):
                # Alone: the worker lives, but has dropped this stream, or never got its call.
                if all_lost or (watch.last < late and not watch.paused):
                    self._lost.failed(name)
                    watch.on_lost()
        self._timer = loop.call_later(WATCH_SECONDS, self._look) if self._workers else None
