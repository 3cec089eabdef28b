"""The opener of an attempt may vanish at any point: nothing of the attempt stays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from cluster.errors import DrainingError, StaleTransferError
from wire import common_pb2
from worker.attempt_log import AttemptLog
from worker.attempts import Attempts


@dataclass(eq=False)
class Attempt:
    transfer_id: bytes = b"t" * 16
    log: AttemptLog = field(default_factory=lambda: AttemptLog(lambda: 1))


@pytest.fixture
def cancelled():
    return []


@pytest.fixture
def attempts(cancelled):
    async def cancel(attempt):
        cancelled.append(attempt)

    return Attempts(cancel=cancel, max_attempts=4, detach_seconds=0.1)


async def gone(attempts):
    async with asyncio.timeout(60):
        while len(attempts):
            await asyncio.sleep(0.01)


async def test_one_that_is_never_read_is_cancelled(attempts, cancelled):
    attempt = Attempt()
    attempts.open(attempt)
    await gone(attempts)
    assert cancelled == [attempt]
    with pytest.raises(StaleTransferError):
        attempts.open(Attempt())


async def test_a_reader_that_ends_in_the_middle_of_an_event_starts_the_timer(attempts, cancelled):
    attempt = Attempt()
    attempts.open(attempt)
    attempt.log.add(common_pb2.Token(position=1))
    reading = attempts.read(attempt)
    await anext(reading)
    await reading.aclose()  # what gRPC does when the event can't be written any more
    assert not attempt.log.has_reader
    await gone(attempts)
    assert cancelled == [attempt]


async def test_a_reader_that_comes_back_keeps_it(attempts, cancelled):
    attempt = Attempt()
    attempts.open(attempt)
    attempt.log.add(common_pb2.Token(position=1))
    await attempts.read(attempt).aclose()
    reading = attempts.read(attempt)
    await anext(reading)
    await asyncio.sleep(0.3)
    assert len(attempts) == 1
    assert not cancelled
    attempt.log.end(common_pb2.AttemptEnd())
    assert [event.WhichOneof("event") async for event in reading][-1] == "end"
    assert len(attempts) == 0


async def test_a_cancelled_one_is_gone_at_once_and_refused(attempts, cancelled):
    attempt = Attempt()
    attempts.open(attempt)
    await attempts.cancel(attempt)
    assert len(attempts) == 0
    assert cancelled == [attempt]
    with pytest.raises(StaleTransferError):
        attempts.open(Attempt())


async def test_a_cancel_whose_caller_hangs_up_is_done_to_its_end():
    may_end = asyncio.Event()

    async def cancel(attempt):
        await may_end.wait()

    attempts = Attempts(cancel=cancel, max_attempts=4, detach_seconds=60.0)
    attempt = Attempt()
    attempts.open(attempt)
    caller = asyncio.create_task(attempts.cancel(attempt))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await gone(attempts)


async def test_an_attempt_that_cannot_be_cancelled_does_not_keep_the_others():
    """A stopped engine refuses every call; the worker must still end each attempt, and exit."""
    cancelled: list[bytes] = []

    async def cancel(attempt):
        if attempt.transfer_id == b"0" * 16:
            raise DrainingError("the engine has stopped")
        cancelled.append(attempt.transfer_id)

    attempts = Attempts(cancel=cancel, max_attempts=4, detach_seconds=60.0)
    for name in (b"0", b"1"):
        attempts.open(Attempt(name * 16))
    await attempts.close()
    assert cancelled == [b"1" * 16]
    assert len(attempts) == 0
