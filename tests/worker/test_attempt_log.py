"""The log of an attempt: replays, newest reader wins, beats, ends."""

import asyncio
import gc
import sys

import pytest

from wire import common_pb2
from worker.attempt_log import AttemptLog


def token(position: int) -> common_pb2.Token:
    return common_pb2.Token(position=position, token_id=position + 100)


def done() -> common_pb2.AttemptEnd:
    return common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_DONE)


async def read_all(log: AttemptLog, from_position: int = 0) -> list[common_pb2.AttemptEvent]:
    return [event async for event in log.read(from_position)]


def positions(events: list[common_pb2.AttemptEvent]) -> list[int]:
    return [event.token.position for event in events if event.HasField("token")]


async def test_a_reader_gets_every_token_once_and_then_the_end():
    log = AttemptLog(lambda: 7)
    reading = asyncio.create_task(read_all(log))
    for position in range(5):
        log.add(token(position))
        await asyncio.sleep(0)
    log.end(done())
    events = await asyncio.wait_for(reading, 60)
    assert positions(events) == [0, 1, 2, 3, 4]
    assert events[-1].end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE
    assert log.end_taken


async def test_a_second_reader_starts_at_its_position_and_ends_the_first():
    log = AttemptLog(lambda: 0)
    first = log.read()
    for position in range(3):
        log.add(token(position))
    assert (await anext(first)).token.position == 0
    second = asyncio.create_task(read_all(log, from_position=2))
    await asyncio.sleep(0)
    rest = [event async for event in first]
    assert rest == []
    log.add(token(3))
    log.end(done())
    assert positions(await asyncio.wait_for(second, 60)) == [2, 3]


async def test_silence_is_filled_with_beats_that_carry_the_step():
    log = AttemptLog(lambda: 41)
    reader = log.read()
    event = await asyncio.wait_for(anext(reader), 60)
    assert event.beat.engine_step == 41
    await reader.aclose()
    assert not log.has_reader


async def test_a_hung_engine_sends_no_beat():
    log = AttemptLog(lambda: None)
    reading = asyncio.create_task(read_all(log))
    await asyncio.sleep(0.8)  # longer than a beat
    log.end(done())
    events = await asyncio.wait_for(reading, 60)
    assert [event.WhichOneof("event") for event in events] == ["end"]


async def test_only_the_first_end_counts():
    log = AttemptLog(lambda: 0)
    log.end(done())
    log.end(common_pb2.AttemptEnd(outcome=common_pb2.ATTEMPT_OUTCOME_ABORTED))
    assert (await read_all(log))[-1].end.outcome == common_pb2.ATTEMPT_OUTCOME_DONE


async def test_unread_tokens_are_counted_for_the_newest_reader():
    log = AttemptLog(lambda: 0)
    for position in range(10):
        log.add(token(position))
    assert log.unread_tokens == 10
    reader = log.read()
    for _ in range(4):
        await anext(reader)
    assert log.unread_tokens in (6, 7)  # the token in the reader's hands counts until it asks for the next
    await reader.aclose()


@pytest.mark.xfail(
    strict=True, reason="columns trimmed by what their reader acknowledged: the new token path"
)
async def test_tokens_that_were_read_are_not_kept_as_an_object_each():
    """Each object takes 0.8 KB for as long as the attempt lives."""
    log, count = AttemptLog(lambda: 7), 10_000
    reading = log.read()
    gc.collect()
    before = sys.getallocatedblocks()
    for position in range(count):
        log.add(token(position))
        await anext(reading)
    gc.collect()
    kept = sys.getallocatedblocks() - before
    await reading.aclose()
    assert kept < count / 10
