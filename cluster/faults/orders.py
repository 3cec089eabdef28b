"""Faults ordered through files in a directory, which a test may change while processes run.

orders.json    [{"id": "7", "point": "prefill.reserved", "act": "kill", "at": 3, "process": ""}, …]
taken-7        created by the process that carries out order 7; the first process to create it wins
injected.jsonl   one line per order carried out, written before the fault
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.faults.points import NO_FAULTS, Act, FaultAction, FaultPoint, Faults, MessagePoint, Point

log = logging.getLogger(__name__)
_IN_PLACE = (Act.KILL, Act.STOP)


@dataclass(frozen=True)
class Order:
    """Do `act` when `process` ("" = any process) passes `point` for the `at`-th time."""

    id: str
    point: str  # name of a Point, or "message.<kind>"
    act: str
    at: int = 1
    seconds: float = 0.0
    process: str = ""


@dataclass(frozen=True)
class InjectedFault:
    """An order that was carried out. `monotonic` is CLOCK_MONOTONIC, shared by all processes of a machine."""

    id: str
    point: str
    act: str
    process: str
    pid: int
    whose: str
    monotonic: float


def open_faults(directory: Path | None, process: str) -> Faults:
    """Open the orders of a directory. Without one, as in production, every point does nothing."""
    if directory is None:
        return NO_FAULTS
    log.warning("%s injects the faults ordered in %s: this is a test", process, directory)
    return OrderedFaults(directory, process)


class OrderedFaults:
    """Thread-safe: the event loop, the engine's thread and threads of ranks pass points."""

    def __init__(self, directory: Path, process: str):
        self._directory = directory
        self._process = process
        self._lock = threading.Lock()
        self._version: tuple[int, int] = (0, 0)
        self._orders: list[Order] = []
        self._passed: dict[str, int] = {}  # times passed, by order id

    def point(self, point: Point) -> FaultPoint:
        return partial(self._pass, point.value)

    def messages(self) -> MessagePoint:
        return lambda kind, whose: self._pass(f"message.{kind}", whose, message=True)

    def _pass(self, point: str, whose: object, *, message: bool = False) -> FaultAction | None:
        with self._lock:
            order = self._due(point)
        if order is None:
            return None
        act = Act(order.act)
        self._tell(order, whose)
        if act in _IN_PLACE:
            os.kill(os.getpid(), signal.SIGKILL if act is Act.KILL else signal.SIGSTOP)
        elif act is Act.DELAY and not message:
            time.sleep(order.seconds)  # blocks the thread, as a slow disk or a page fault would
        return FaultAction(act, order.seconds)

    def _due(self, point: str) -> Order | None:
        self._refresh()
        due: Order | None = None
        for order in self._orders:
            if order.point != point or order.process not in ("", self._process):
                continue
            self._passed[order.id] = self._passed.get(order.id, 0) + 1
            if due is None and self._passed[order.id] == order.at and self._take(order):
                due = order
        return due

    def _refresh(self) -> None:
        try:
            stat = os.stat(self._directory / "orders.json")
            version = (stat.st_mtime_ns, stat.st_ino)
            if version != self._version:
                read: list[dict[str, Any]] = json.loads((self._directory / "orders.json").read_text())
                self._orders = [Order(**order) for order in read]
                self._version = version
        except FileNotFoundError:
            self._orders = []

    def _take(self, order: Order) -> bool:
        try:
            os.close(os.open(self._directory / f"taken-{order.id}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _tell(self, order: Order, whose: object) -> None:
        name = whose.hex() if isinstance(whose, bytes) else str(whose)
        now = time.monotonic()
        injected = InjectedFault(order.id, order.point, order.act, self._process, os.getpid(), name, now)
        line = json.dumps(asdict(injected)) + "\n"
        file = os.open(self._directory / "injected.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, line.encode())  # one write, so lines of several processes do not interleave
        finally:
            os.close(file)
