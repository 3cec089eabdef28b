"""What this router hears of each worker, over all its streams.

Every stream carries a beat each 0.5 s. A worker from which no stream has brought anything for 2 s is suspect: it
gets no new work. After 5 s it is lost, for every stream at once: one that was opened later need not wait 5 s of its
own. A stream that alone is silent for 5 s is lost by itself.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SUSPECT_SECONDS = 2.0
LOST_SECONDS = 5.0
WATCH_SECONDS = 0.1


@dataclass(eq=False)
class Watch:
    """One stream. `heard` whenever anything comes on it."""

    worker: _Worker
    on_lost: Callable[[], None]
    last: float
    paused: bool = False  # nobody reads it: a slow client is no sign of a lost worker

    def heard(self) -> None:
        self.last = self.worker.last = asyncio.get_running_loop().time()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self.heard()


@dataclass
class _Worker:
    worker_id: str
    last: float
    watches: list[Watch] = field(default_factory=list)

    def silent_since(self) -> float:
        """When something came last; infinity while a stream is not read, which might have brought something."""
        return math.inf if any(watch.paused for watch in self.watches) else self.last


class Liveness:
    """`watch` a stream while it is open. Workers are named by their life (worker_id@epoch)."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watch(self, worker_id: str, name: str, on_lost: Callable[[], None]) -> Iterator[Watch]:
        loop = asyncio.get_running_loop()
        worker = self._workers.get(name)
        if worker is None:
            worker = self._workers[name] = _Worker(worker_id, loop.time())
        watch = Watch(worker, on_lost, loop.time())
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
        """As many as `suspects` names, on whichever thread."""
        since = time.monotonic() - SUSPECT_SECONDS
        return sum(worker.silent_since() < since for worker in list(self._workers.values()))

    @property
    def suspects(self) -> frozenset[str]:
        """Ids of workers that have been silent too long for new work."""
        if not self._workers:
            return frozenset()
        since = asyncio.get_running_loop().time() - SUSPECT_SECONDS
        return frozenset(
            worker.worker_id for worker in self._workers.values() if worker.silent_since() < since
        )

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        late = loop.time() - LOST_SECONDS
        for worker in list(self._workers.values()):
            all_lost = worker.silent_since() < late
            for watch in list(worker.watches):
                # On its own: the worker lives, but has dropped this one.
                if all_lost or (watch.last < late and not watch.paused):
                    watch.on_lost()
        self._timer = loop.call_later(WATCH_SECONDS, self._look) if self._workers else None
