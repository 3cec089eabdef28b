"""Delayed messages are sent with the next urgent one, with enough of their kind, or after a moment."""

from __future__ import annotations

import asyncio

import pytest

from kv_transfer.outbox import MAX_DELAYED_MESSAGES, MAX_QUEUED_MESSAGES, Outbox
from wire import handoff_pb2


def message(part: int) -> handoff_pb2.DecodeToPrefill:
    return handoff_pb2.DecodeToPrefill(part_result=handoff_pb2.PartResult(part=part, verified=True))


async def taken(outbox: Outbox[handoff_pb2.DecodeToPrefill]) -> list[int]:
    """The parts of the next message."""
    first = await asyncio.wait_for(outbox.get(), 30)
    assert first is not None
    return [first.part_result.part, *(further.part_result.part for further in first.more)]


def waits(outbox: Outbox[handoff_pb2.DecodeToPrefill]) -> bool:
    """Nothing would be sent now."""
    return not outbox.due


async def test_a_message_is_sent_at_once_with_those_that_wait():
    outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
    outbox.put(message(0), delayable=True)
    assert waits(outbox)
    outbox.put(message(1))
    assert await taken(outbox) == [0, 1]
    assert waits(outbox)


async def test_delayed_messages_leave_when_there_are_enough():
    outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
    for part in range(MAX_DELAYED_MESSAGES - 1):
        outbox.put(message(part), delayable=True)
    assert waits(outbox)
    outbox.put(message(MAX_DELAYED_MESSAGES - 1), delayable=True)
    assert await taken(outbox) == list(range(MAX_DELAYED_MESSAGES))


async def test_a_delayed_message_is_sent_by_itself_after_a_moment():
    outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
    outbox.put(message(0), delayable=True)
    assert await taken(outbox) == [0]
    outbox.put(message(1), delayable=True)  # the timer runs again
    assert await taken(outbox) == [1]


async def test_the_end_comes_after_what_is_queued():
    outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
    outbox.put(message(0), delayable=True)
    outbox.end()
    assert await taken(outbox) == [0]
    assert await outbox.get() is None
    assert await outbox.get() is None


async def test_it_is_bounded_and_sends_bursts_in_pieces():
    outbox: Outbox[handoff_pb2.DecodeToPrefill] = Outbox()
    for part in range(MAX_QUEUED_MESSAGES):
        outbox.put(message(part))
    with pytest.raises(asyncio.QueueFull):
        outbox.put(message(0))
    outbox.end()  # always reaches the reader
    parts: list[int] = []
    while (piece := await outbox.get()) is not None:
        parts += [piece.part_result.part, *(further.part_result.part for further in piece.more)]
    assert parts == list(range(MAX_QUEUED_MESSAGES))
