"""A device that works through two queues, the engine's and the copier's, on threads of its own and behind its host."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from kv_transfer.device.cpu import CpuCopier
from tests.kv_transfer.device.scripted_copier import ScriptedCopier, Work
from tests.kv_transfer.pair import Device

MAX_SECONDS = 0.002  # that a work takes


class LaggingDevice:
    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self.copiers: list[LaggingCopier] = []
        self._engine: deque[Work] = deque()
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._compute, daemon=True)]
        self._threads[0].start()

    @property
    def device(self) -> Device:
        return Device(self._make)

    def _make(self, cache: torch.Tensor, part_bytes: int) -> LaggingCopier:
        copier = LaggingCopier(CpuCopier(cache), works_at_once=4)
        copier.engine = self
        self.copiers.append(copier)
        self._threads.append(threading.Thread(target=self._copy, args=(copier,), daemon=True))
        self._threads[-1].start()
        return copier

    def enqueue(self, run: Callable[[], object]) -> Work:
        """In the engine's queue."""
        self._engine.append(Work("engine", lambda: (run(), True)[1]))
        return self._engine[-1]

    def _compute(self) -> None:
        while not self._closing.is_set():
            if self._engine:
                self._lag()
                self._engine.popleft().end()
            else:
                time.sleep(0.0005)

    def _copy(self, copier: LaggingCopier) -> None:
        """One work after the other; each waits for its mark, and so do those behind it."""
        while not self._closing.is_set():
            waiting = copier.waiting
            if waiting and (waiting[0].after is None or waiting[0].after.result()):
                self._lag()
                waiting[0].end()
            else:
                time.sleep(0.0005)

    def _lag(self) -> None:
        time.sleep(self._random.random() * MAX_SECONDS)

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join(10)


class LaggingCopier(ScriptedCopier):
    engine: LaggingDevice

    def mark(self) -> Work:
        return self.engine.enqueue(lambda: None)
