"""Threads go to tenants in turns, and cancelled calls never run."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.errors import DrainingError
from cluster.fair_threads import FairThreads


class Gate:
    """Calls that wait for each other's end, in the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go_on = threading.Semaphore(0)

    def call(self, name: str) -> str:
        self.began.append(name)
        assert self.go_on.acquire(timeout=30)
        return name


@pytest.fixture
async def threads() -> AsyncIterator[FairThreads]:
    threads = FairThreads(1, "test")
    yield threads
    threads.close()


async def began(gate: Gate, count: int) -> None:
    async with asyncio.timeout(20):
        while len(gate.began) < count:
            await asyncio.sleep(0.001)


async def test_tenants_take_turns(threads: FairThreads) -> None:
    gate = Gate()
    names = ["a1", "a2", "a3", "a4", "b1", "c1", "b2"]
    calls = [asyncio.create_task(threads.run(name[0], gate.call, name)) for name in names]
    for done in range(len(names)):
        await began(gate, done + 1)
        gate.go_on.release()
    assert await asyncio.gather(*calls) == names
    assert gate.began == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_calls_cancelled_before_their_turn_are_never_run(threads: FairThreads) -> None:
    gate = Gate()
    first = asyncio.create_task(threads.run("a", gate.call, "first"))
    await began(gate, 1)
    others = [asyncio.create_task(threads.run("a", gate.call, "cancelled")) for _ in range(5)]
    await asyncio.sleep(0)
    for one in others:
        one.cancel()
    await asyncio.wait(others)
    gate.go_on.release()
    assert await first == "first"
    gate.go_on.release()
    assert await threads.run("a", gate.call, "last") == "last"
    assert gate.began == ["first", "last"]


async def test_a_running_call_keeps_its_thread_after_it_was_cancelled(threads: FairThreads) -> None:
    gate = Gate()
    running = asyncio.create_task(threads.run("a", gate.call, "running"))
    await began(gate, 1)
    running.cancel()
    await asyncio.wait([running])
    waiting = asyncio.create_task(threads.run("b", gate.call, "waiting"))
    await asyncio.sleep(0.05)
    assert gate.began == ["running"]
    gate.go_on.release()
    await began(gate, 2)
    gate.go_on.release()
    assert await waiting == "waiting"


async def test_a_turn_that_comes_with_the_cancel_is_passed_on(threads: FairThreads) -> None:
    gate = Gate()
    first = asyncio.create_task(threads.run("a", gate.call, "first"))
    await began(gate, 1)
    second = asyncio.create_task(threads.run("a", gate.call, "second"))
    third = asyncio.create_task(threads.run("b", gate.call, "third"))
    await asyncio.sleep(0)
    threads._give_back()  # the second's turn, before it runs
    second.cancel()
    gate.go_on.release()
    gate.go_on.release()
    assert await first == "first" and await third == "third"
    assert second.cancelled() and gate.began == ["first", "third"]


@pytest.mark.parametrize("others", [(), ("a",), ("b",), ("a", "a")])
async def test_a_call_that_is_cancelled_when_a_thread_becomes_free_takes_none(
    others: tuple[str, ...], threads: FairThreads
) -> None:
    gate = Gate()
    first = asyncio.create_task(threads.run("a", gate.call, "first"))
    await began(gate, 1)
    second = asyncio.create_task(threads.run("a", gate.call, "second"))
    waiting = [asyncio.create_task(threads.run(one, gate.call, "waiting")) for one in others]
    await asyncio.sleep(0)
    gate.go_on.release()
    # The first has ended: the loop gets its result in its next turn, and the second's task after that.
    threads._executor.submit(lambda: None).result(20)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    for _ in range(1 + len(others)):
        gate.go_on.release()
    async with asyncio.timeout(20):
        assert await asyncio.gather(first, *waiting) == ["first", *("waiting" for _ in others)]
        assert await threads.run("c", gate.call, "last") == "last"


async def test_a_call_wakes_the_loop_once(threads: FairThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its result, and for the next turn."""
    loop = asyncio.get_running_loop()
    woken: list[tuple[Any, ...]] = []
    wake = loop.call_soon_threadsafe

    def counted(*arguments: Any) -> Any:
        woken.append(arguments)
        return wake(*arguments)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    calls = [asyncio.create_task(threads.run(name, str, name)) for name in "abc"]
    assert await asyncio.gather(*calls) == ["a", "b", "c"]
    assert len(woken) == 3


async def test_an_error_gives_the_thread_back(threads: FairThreads) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run("a", lambda: 1 // 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
async def test_threads_may_have_a_lower_priority() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = nice()
    lower = FairThreads(1, "test", nice=5)
    assert await lower.run("a", nice) == min(19, here + 5)
    assert nice() == here
    lower.close()


async def test_a_sandbox_that_denies_priorities_stops_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", denied)
    lower = FairThreads(1, "test", nice=5)
    assert await lower.run("a", str, 7) == "7"
    lower.close()


async def test_calls_of_closed_threads_are_refused_for_another_process(threads: FairThreads) -> None:
    threads.close()
    for _ in range(2):
        with pytest.raises(DrainingError):
            await asyncio.wait_for(threads.run("a", str), 5)


async def test_calls_that_wait_when_the_threads_are_closed_end_before_the_one_that_runs() -> None:
    gate, closed = Gate(), FairThreads(1, "test")
    running = asyncio.create_task(closed.run("a", gate.call, "runs"))
    waiting = [asyncio.create_task(closed.run(tenant, gate.call, "waits")) for tenant in "aab"]
    await began(gate, 1)
    closed.close()
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in ends] == 3 * [DrainingError]
        gate.go_on.release(4)
        assert await running == "runs"
    assert gate.began == ["runs"]


async def test_a_turn_that_comes_just_before_the_end_is_refused() -> None:
    gate, closed = Gate(), FairThreads(1, "test")
    running = asyncio.create_task(closed.run("a", gate.call, "runs"))
    waiting = asyncio.create_task(closed.run("b", gate.call, "waits"))
    await began(gate, 1)
    closed._give_back()  # the waiting call has its turn, and its task has not run since
    closed.close()
    gate.go_on.release(2)
    with pytest.raises(DrainingError):
        await asyncio.wait_for(waiting, 20)
    assert await running == "runs"


async def test_a_thread_that_cannot_be_started_costs_one_call(
    threads: FairThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call's turn went with it: a pool that had met it once never ran anything again."""

    def none_free(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threads._executor, "submit", none_free)
        with pytest.raises(RuntimeError):
            await threads.run("a", int)
    async with asyncio.timeout(20):
        assert await threads.run("a", int) == 0


async def test_a_call_whose_thread_cannot_be_started_is_dropped_and_gives_one_turn_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The executor has queued the call by then: a thread that is there takes it. It gave the turn back once more."""
    threads = FairThreads(2, "two")
    ran: list[int] = []

    def none_free(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    try:
        assert await threads.run("a", int) == 0
        with monkeypatch.context() as patch:
            patch.setattr(threads._executor, "_adjust_thread_count", none_free)
            with pytest.raises(RuntimeError):
                await threads.run("a", ran.append, 1)
        assert await threads.run("a", int) == 0  # behind it, on the same thread
        await asyncio.sleep(0)
        assert (ran, threads._free) == ([], 2)
    finally:
        threads.close()
