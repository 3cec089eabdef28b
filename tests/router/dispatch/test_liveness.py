"""Silence of a worker is detected once, for all its streams."""

from __future__ import annotations

import asyncio

import pytest
from router.dispatch.liveness import Liveness

from router.dispatch import liveness as module
from router.link.backoff import FIRST_SECONDS
from tests.harness.waiting import until


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, seconds in (("SUSPECT_SECONDS", 0.6), ("LOST_SECONDS", 1.5), ("WATCH_SECONDS", 0.02)):
        monkeypatch.setattr(module, name, seconds)


async def test_a_stream_opened_later_is_lost_with_the_first():
    liveness, lost = Liveness(), []
    with liveness.watch("d@1", lambda: lost.append("first")):
        await asyncio.sleep(0.9)
        assert liveness.suspects == {"d@1"}
        with liveness.watch("d@1", lambda: lost.append("second")):
            async with asyncio.timeout(1.3):  # the second alone would have 1.5 s
                while len(lost) < 2:
                    await asyncio.sleep(0.01)
    assert set(lost) == {"first", "second"}


async def test_a_lost_worker_gets_nothing_new_until_its_time_is_up_or_it_answers():
    """For as long as a partition lasts, only one request after the other pays for finding out."""
    liveness, lost = Liveness(), []
    with liveness.watch("d@1", lambda: lost.append("first")):
        await until(lambda: lost, "the worker is lost", 5.0)
    assert liveness.suspects == {"d@1"}
    await asyncio.sleep(FIRST_SECONDS)
    assert liveness.suspects == frozenset(), "it is tried"
    liveness.not_reached("d@1")
    assert liveness.suspects == {"d@1"}
    with liveness.watch("d@1", lambda: lost.append("second")) as watch:  # no other watch was open
        watch.responded()
        assert liveness.suspects == frozenset()


async def test_a_worker_silent_on_a_stream_is_lost_though_others_answer():
    """The way to it is cut, the way back is not."""
    liveness, lost = Liveness(), []
    with (
        liveness.watch("d@1", lambda: lost.append("old")) as old,
        liveness.watch("d@1", lambda: lost.append("new")),
    ):
        old.responded()
        while not lost:
            old.responded()
            await asyncio.sleep(0.02)
        assert lost == ["new"] and liveness.suspects == {"d@1"}


async def test_one_stream_that_brings_something_keeps_the_worker_but_not_the_silent_one():
    liveness, lost = Liveness(), []
    with (
        liveness.watch("d@1", lambda: lost.append("silent")),
        liveness.watch("d@1", lambda: lost.append("heard")) as heard,
    ):
        for _ in range(100):
            heard.responded()
            await asyncio.sleep(0.02)
    assert set(lost) == {"silent"}


async def test_a_slow_reader_loses_no_event():
    liveness, lost = Liveness(), []
    with liveness.watch("d@1", lambda: lost.append("slow")) as watch:
        watch.pause()
        await asyncio.sleep(2.0)
        assert liveness.suspects == frozenset()
        watch.resume()
        await asyncio.sleep(0.1)
    assert lost == []


async def test_another_life_of_the_worker_is_another_worker():
    liveness, lost = Liveness(), []
    with liveness.watch("d@1", lambda: lost.append("old")):
        await asyncio.sleep(1.2)
        with liveness.watch("d@2", lambda: lost.append("new")):
            await asyncio.sleep(0.6)
    assert set(lost) == {"old"}


async def test_a_message_costs_no_look_for_the_loop(monkeypatch):
    """On Python 3.11 get_running_loop calls getpid, a system call for each message."""
    liveness = Liveness()
    with liveness.watch("d@1", lambda: None) as watch:
        before = watch.last

        def look() -> None:
            raise AssertionError("asked which loop runs")

        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "get_running_loop", look)
            for _ in range(100):
                watch.responded()
        assert watch.last > before
        assert watch.worker.last == watch.last
