"""Silence of a worker is noticed once, for all its streams."""

from __future__ import annotations

import asyncio

import pytest

from router.dispatch import liveness as module
from router.dispatch.liveness import Liveness


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, seconds in (("SUSPECT_SECONDS", 0.6), ("LOST_SECONDS", 1.5), ("WATCH_SECONDS", 0.02)):
        monkeypatch.setattr(module, name, seconds)


async def test_a_stream_opened_later_is_lost_with_the_first():
    liveness, lost = Liveness(), []
    with liveness.watch("d", "d@1", lambda: lost.append("first")):
        await asyncio.sleep(0.9)
        assert liveness.suspects == {"d"}
        with liveness.watch("d", "d@1", lambda: lost.append("second")):
            async with asyncio.timeout(1.3):  # the second alone would have 1.5 s
                while len(lost) < 2:
                    await asyncio.sleep(0.01)
    assert set(lost) == {"first", "second"}
    assert liveness.suspects == frozenset()


async def test_one_stream_that_brings_something_keeps_the_worker_but_not_the_silent_one():
    liveness, lost = Liveness(), []
    with (
        liveness.watch("d", "d@1", lambda: lost.append("silent")),
        liveness.watch("d", "d@1", lambda: lost.append("heard")) as heard,
    ):
        for _ in range(100):
            heard.heard()
            await asyncio.sleep(0.02)
        assert liveness.suspects == frozenset()
    assert set(lost) == {"silent"}


async def test_a_slow_reader_loses_nobody():
    liveness, lost = Liveness(), []
    with liveness.watch("d", "d@1", lambda: lost.append("slow")) as watch:
        watch.pause()
        await asyncio.sleep(2.0)
        assert liveness.suspects == frozenset()
        watch.resume()
        await asyncio.sleep(0.1)
    assert lost == []


async def test_another_life_of_the_worker_is_another_worker():
    liveness, lost = Liveness(), []
    with liveness.watch("d", "d@1", lambda: lost.append("old")):
        await asyncio.sleep(1.2)
        with liveness.watch("d", "d@2", lambda: lost.append("new")):
            await asyncio.sleep(0.6)
    assert set(lost) == {"old"}
