"""A device whose work is done when a test says so, in main memory: what is read or written early has the wrong bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kv_transfer.device.base import Mark, ReadPart
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.rows import CacheRegion


@dataclass(eq=False)
class Work:
    name: str
    run: Callable[[], Any]
    after: Mark | None = None
    value: Any = None
    region: CacheRegion | None = None

    def result(self) -> Any:
        return self.value

    @property
    def has_ended(self) -> bool:
        return self.value is not None

    def end(self) -> None:
        assert not self.has_ended, f"{self.name} has ended already"
        assert self.after is None or self.after.result(), f"{self.name} before the mark that it waits for"
        self.value = self.run()


@dataclass(eq=False)
class Reached:
    """Once works have ended."""

    works: list[Work]

    def result(self) -> bool | None:
        return True if all(work.has_ended for work in self.works) else None


@dataclass(eq=False)
class ScriptedCopier:
    inner: CpuCopier
    marks: list[Work] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)  # in the order of the stream
    works_at_once: int = 1 << 30
    threads: list[str] = field(default_factory=list)
    unreleased: int = 0  # parts that have been read

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def digest_kinds(self) -> tuple[str, ...]:
        return self.inner.digest_kinds

    def allocate(self, size: int) -> Tensor:
        return self.inner.allocate(size)

    def use_thread(self) -> None:
        self.threads.append(threading.current_thread().name)

    def mark(self) -> Work:
        self.marks.append(Work("mark", lambda: True))
        return self.marks[-1]

    def enqueued(self) -> Reached:
        return Reached(list(self.works))

    def pieces(self, region: CacheRegion, least_bytes: int) -> None: ...

    def read(
        self, region: CacheRegion, into: Tensor, kind: str, after: Mark, *, to_host: bool
    ) -> Work | None:
        def run() -> ReadPart:
            read = self.inner.read(region, into, kind, after, to_host=to_host).result()
            self.unreleased += 1
            return replace(read, release=self._release)

        return self._enqueue(Work("read", run, after, region=region))

    def _release(self) -> None:
        self.unreleased -= 1

    def fill(self, slot: Tensor, payload: bytes) -> bool:
        return self.inner.fill(slot, payload)

    def digest(self, data: Tensor, kind: str) -> Work | None:
        return self._enqueue(Work("digest", lambda: self.inner.digest(data, kind).result()))

    def scatter(self, data: Tensor, region: CacheRegion, after: Mark) -> Work | None:
        run = lambda: self.inner.scatter(data, region, after).result()  # noqa: E731
        return self._enqueue(Work("scatter", run, after, region=region))

    def _enqueue(self, work: Work) -> Work | None:
        if len(self.waiting) >= self.works_at_once:
            return None
        self.works.append(work)
        return work

    # --- the test's side ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Work]:
        return [work for work in self.works if not work.has_ended]

    @property
    def names(self) -> list[str]:
        """Of the works that have not ended."""
        return [work.name for work in self.waiting]

    def end_next(self, name: str) -> Work:
        """A stream does one thing after the other."""
        work = self.waiting[0]
        assert work.name == name, self.names
        work.end()
        return work

    def end_marks(self) -> None:
        for mark in self.marks:
            if not mark.has_ended:
                mark.end()
