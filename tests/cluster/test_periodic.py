"""An action is repeated until it is closed, although it raises exceptions."""

from __future__ import annotations

import asyncio

from cluster.periodic import Periodic
from tests.harness.waiting import until


async def test_an_action_that_fails_is_repeated_and_logged(caplog) -> None:
    runs: list[int] = []

    async def fail() -> None:
        runs.append(len(runs))
        raise ValueError("broken")

    periodic = Periodic("reading the meter", 0.001, fail)
    periodic.start()
    await until(lambda: len(runs) > 2, "it goes on")
    await periodic.close(5.0)
    assert "reading the meter failed; retrying" in caplog.text


async def test_closing_waits_for_the_action_but_not_for_the_pause() -> None:
    ended, begun = [], asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.sleep(0.05)
        ended.append(True)

    periodic = Periodic("working", 3600.0, work)
    periodic.start()
    await begun.wait()
    await periodic.close(5.0)
    assert ended == [True]


async def test_one_that_was_not_started_closes() -> None:
    worked: list[bool] = []

    async def work() -> None:
        worked.append(True)

    await Periodic("working", 1.0, work).close(1.0)
    assert not worked
