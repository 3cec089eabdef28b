"""Errors that would leave a process of a router without supervision, or without its link."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from cluster.config.router import RouterConfig
from cluster.protocol.times import LOOP_STALL_SECONDS, SUSPECT_SECONDS
from router.processes import parent
from router.processes.memory import Figure, SharedMemory
from router.processes.merged_metrics import MergedMetrics
from router.processes.metrics_port import MetricsPort
from router.processes.parent import LATE_SECONDS, RouterProcesses, Watch, ending


def test_every_end_has_a_text() -> None:
    assert ending(3) == "ended with code 3"
    assert ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert ending(-40) == "was ended by signal 40"


async def test_a_process_that_is_not_supervised_ends_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    async def supervise(self: Any, index: int, first: asyncio.Future[None]) -> None:
        first.set_result(None)
        raise RuntimeError("a mistake")

    monkeypatch.setattr(RouterProcesses, "_supervise", supervise)
    running = RouterProcesses(RouterConfig(model=Path("m"), processes=2, http_port=0, grpc_port=0))
    await running.start()
    try:
        assert "a mistake" in await asyncio.wait_for(asyncio.shield(running.failed), 10)
    finally:
        await running.close()


class Child:
    """A process that serves, as far as its parent watches it."""

    def __init__(self, index: int):
        self.index, self.serves, self.drained = index, True, asyncio.Event()
        self.signals: list[signal.Signals] = []
        self.sent: list[Any] = []

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def send(self, message: Any) -> None:
        self.sent.append(message["do"])


def silent_for(memory: SharedMemory, index: int, seconds: float) -> None:
    memory.slot(index).set(Figure.BEAT, time.monotonic_ns() - int(seconds * 1e9))


async def test_a_process_that_stands_still_is_killed_unless_the_parent_stood_still_too() -> None:
    memory, children = SharedMemory.create(2, 4), {index: Child(index) for index in range(2)}
    watch = Watch(memory, cast(Any, children))
    silent_for(memory, 0, LOOP_STALL_SECONDS + 1)
    silent_for(memory, 1, LOOP_STALL_SECONDS - 5)
    watch._due = time.monotonic() - LATE_SECONDS - 1  # it was stopped, and perhaps the others with it
    for _ in range(2):
        await watch._look()
        assert not children[0].signals, "they have time to go on"
    watch._lenient_until = 0.0
    await watch._look()
    assert children[0].signals == [signal.SIGKILL] and not children[1].signals
    children[0].signals.clear()
    children[0].serves = False
    await watch._look()
    assert not children[0].signals, "one that starts has time to load"


async def test_of_processes_that_do_not_drain_those_that_answer_may_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = RouterProcesses(RouterConfig(model=Path("m"), processes=3, http_port=0, grpc_port=0))
    silent, _, ready = children = [Child(index) for index in range(3)]
    running._children.update(cast(Any, {one.index: one for one in children}))
    ready.drained.set()
    silent_for(running._memory, 0, SUSPECT_SECONDS + 1)
    silent_for(running._memory, 1, 0)
    silent_for(running._memory, 2, SUSPECT_SECONDS + 1)
    monkeypatch.setattr(parent, "drain_limit_seconds", lambda config: 0.01)
    monkeypatch.setattr(running, "_tasks", [])
    await running.close()
    assert [one.sent for one in children] == [["drain", "stop"]] * 3
    assert "process 0 does not answer; it is killed" in caplog.text and silent.signals
    assert caplog.text.count("does not answer") == 1


class LateChild(Child):
    """A process whose start takes until `go_on`, and that ends by SIGTERM, as one without requests does."""

    go_on: asyncio.Event

    def __init__(self, index: int, *_: Any):
        super().__init__(index)
        self.serves = False
        self.started: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    async def start(self, *_: Any) -> None:
        await self.go_on.wait()

    def signal(self, number: signal.Signals) -> None:
        super().signal(number)
        self.ended.set()

    async def wait(self) -> int:
        await self.ended.wait()
        return -signal.SIGTERM


async def test_a_process_that_is_being_started_while_the_router_leaves_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told to drain and not to stop, which `close` had told all others before: it waited for the drain limit."""
    LateChild.go_on = asyncio.Event()
    monkeypatch.setattr(parent, "ChildProcess", LateChild)
    running = RouterProcesses(RouterConfig(model=Path("m"), processes=2, http_port=0, grpc_port=0))
    starting = asyncio.create_task(running.start())
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(running.close())
    await asyncio.sleep(0.1)
    LateChild.go_on.set()
    await asyncio.wait_for(closing, 10)
    assert not running._children
    await asyncio.gather(starting, return_exceptions=True)


async def test_the_parent_is_not_live_once_its_loop_stands_still() -> None:
    config = RouterConfig(model=Path("m"), processes=2, metrics_port=0)
    port = MetricsPort(config, MergedMetrics(CollectorRegistry()), list, {})
    try:
        assert port._why_not_live() == []
        port._turned -= LOOP_STALL_SECONDS + 5
        assert port._why_not_live() == [f"the event loop has stood still for {LOOP_STALL_SECONDS + 5:.0f} s"]
    finally:
        await asyncio.to_thread(port.close)
