"""The queue of tokens between attempt and reader: in order, in batches, paced, and ended by the right event."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from router.dispatch.batch_queue import BatchQueue


async def test_queued_items_are_taken_together():
    box: BatchQueue[int] = BatchQueue()
    for number in range(3):
        box.add(number)
    assert await box.take() == [0, 1, 2]
    asyncio.get_running_loop().call_soon(box.add, 7)
    assert await box.take() == [7]


async def test_it_ends_after_its_last_producer():
    box: BatchQueue[int] = BatchQueue(producers=2)
    box.end()
    box.add(1)
    box.end()
    assert await box.take() == [1]
    assert await box.take() == []


async def test_an_error_comes_after_queued_items_and_a_discard_at_once():
    box: BatchQueue[int] = BatchQueue()
    box.add(1)
    box.fail(ValueError("first"))
    box.fail(ValueError("second"))
    assert await box.take() == [1]
    with pytest.raises(ValueError, match="first"):
        await box.take()
    other: BatchQueue[int] = BatchQueue(pace_seconds=30.0)
    other.add(1)
    assert await other.take() == [1]
    other.add(2)
    other.discard(ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        await other.take()


async def test_producers_are_told_when_the_reader_waits_and_nothing_lies_unread():
    box: BatchQueue[int] = BatchQueue()
    drained: list[int] = []
    box.when_drained(lambda: drained.append(len(drained)))
    box.add(1)
    await box.take()
    assert not drained, "it deals with what it has taken"
    reading = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    assert drained == [0]
    box.add(2)
    assert await reading == [2]
    reading = asyncio.ensure_future(box.take())
    await asyncio.sleep(0)
    assert drained == [0], "once"
    box.when_drained(lambda: drained.append(len(drained)))
    await asyncio.sleep(0)
    assert drained == [0, 1], "the reader waits already"
    box.add(3)
    assert await reading == [3]
    box.when_drained(lambda: drained.append(len(drained)))
    box.add(4)
    await box.take()
    assert drained == [0, 1], "something lay unread when it came back"


async def test_a_burst_is_paced_but_neither_its_first_nor_its_end():
    box: BatchQueue[int] = BatchQueue(pace_seconds=0.05)
    box.add(0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await box.take() == [0]
    box.add(1)
    loop.call_later(0.01, box.add, 2)
    assert await box.take() == [1, 2]
    assert loop.time() - began >= 0.04
    box.add(3)
    box.end()
    assert await box.take() == [3]


def test_waiting_for_the_pace_does_not_keep_the_loop_busy(monkeypatch):
    """uvloop's clock ticks in milliseconds: what rounding leaves of a pace must not be asked for, over and over."""
    sleeps, pieces, sleep = 0, 100, asyncio.sleep

    async def counted(seconds: float) -> None:
        nonlocal sleeps
        sleeps += 1
        await sleep(seconds)

    async def read() -> None:
        box: BatchQueue[int] = BatchQueue(pace_seconds=0.001)
        for number in range(pieces):
            box.add(number)
            assert await box.take() == [number]

    monkeypatch.setattr("router.dispatch.batch_queue.asyncio.sleep", counted)
    uvloop.run(read())
    assert sleeps <= 2 * pieces


async def test_a_producer_waits_until_the_reader_has_read_everything():
    box: BatchQueue[int] = BatchQueue()
    box.add(1)
    waiting, given_up = asyncio.create_task(box.drained()), asyncio.create_task(box.drained())
    await box.take()
    await asyncio.sleep(0.05)
    assert not waiting.done(), "it deals with what it has taken"
    given_up.cancel()
    reading = asyncio.create_task(box.take())
    assert 0.03 < await asyncio.wait_for(waiting, 5.0) < 5.0, "the seconds waited"
    box.add(2)
    assert await reading == [2]
