"""Background work that allocates and frees runs to its end although its caller stops waiting."""

from __future__ import annotations

import asyncio

import pytest

from cluster.background_tasks import BackgroundTasks


async def test_a_cancelled_wait_does_not_cancel_the_work():
    background_tasks, done, go = BackgroundTasks(), [], asyncio.Event()

    async def work() -> int:
        await go.wait()
        done.append("all of it")
        return 3

    waiting = asyncio.create_task(background_tasks.complete(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await background_tasks.wait(5.0)
    assert done == ["all of it"]
    assert await background_tasks.complete(work()) == 3


async def test_errors_reach_the_waiting_caller_or_the_log(caplog):
    background_tasks = BackgroundTasks()

    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await background_tasks.complete(fail())
    assert not caplog.records
    background_tasks.spawn(fail())
    await background_tasks.wait(5.0)
    await asyncio.sleep(0)
    assert "a background task failed" in caplog.text
