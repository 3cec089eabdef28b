"""A control stream's outgoing messages in any order of urgent and delayed ones, a reader that is slow or cut off, and
the end: all are sent once, in order; no urgent one waits, and no delayed one for longer than its moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer import outbox as module
from kv_transfer.outbox import (
    MAX_DELAY_SECONDS,
    MAX_DELAYED_MESSAGES,
    MAX_TOGETHER,
    MAX_TOGETHER_BYTES,
    Outbox,
)
from tests.harness.virtual_time import VirtualLoop
from wire import handoff_pb2

MOST = 24  # queued: few, so that the bound is met
Message = handoff_pb2.PrefillToDecode


def message(number: int, size: int) -> Message:
    return Message(part=handoff_pb2.PartData(header=handoff_pb2.PartHeader(part=number), payload=bytes(size)))


def numbers(first: Message) -> list[int]:
    return [first.part.header.part, *(one.part.header.part for one in first.more)]


class OutboxMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(module, "MAX_QUEUED_MESSAGES", MOST)

    @initialize(ends_after=st.integers(5, 60))
    def build(self, ends_after: int) -> None:
        async def make() -> Outbox[Message]:
            return Outbox()

        self.box = self.loop.run(make())
        self.put_count = 0
        self.left = 0  # how many have been read
        self.waiting: list[
            tuple[float, bool]
        ] = []  # of those that have not: since when, and whether delayable
        self.reading: asyncio.Task[Message | None] | None = None
        self.ended = False
        self.ends_after = ends_after  # messages

    def inside(self, function: Any, *arguments: Any, **named: Any) -> None:
        async def call() -> None:
            function(*arguments, **named)

        self.loop.run(call())
        self.loop.settle(3)
        self.look()

    @rule(
        delayable=st.booleans(),
        size=st.sampled_from([0, 0, 0, 10, MAX_TOGETHER_BYTES]),
        count=st.integers(1, 5),
    )
    def puts(self, delayable: bool, size: int, count: int) -> None:
        if self.ended:
            return
        for _ in range(count):
            one = message(self.put_count, size)
            if len(self.waiting) >= MOST:
                with pytest.raises(asyncio.QueueFull):
                    self.inside(self.box.put, one, delayable=delayable)
                return
            self.waiting.append((self.loop.time(), delayable))
            self.put_count += 1
            self.inside(self.box.put, one, delayable=delayable)

    @rule()
    def ends(self) -> None:
        """Also twice."""
        if self.put_count >= self.ends_after:
            self.end()

    def end(self) -> None:
        self.ended = True
        self.inside(self.box.end)

    @rule()
    def reads(self) -> None:
        if self.reading is None:

            def read() -> None:
                self.reading = self.loop.create_task(self.box.get())

            self.inside(read)

    @rule(delayable=st.booleans(), count=st.integers(1, 5))
    def a_reader_waits_for_them(self, delayable: bool, count: int) -> None:
        """All that was there has been read; by chance alone few would come to that."""
        for _ in range(MOST):
            if self.reading is None and not self.ended:
                self.reads()
        self.puts(delayable, 0, count)

    @rule()
    def the_reader_is_cut_off(self) -> None:
        if self.reading is not None:
            reading, self.reading = self.reading, None
            self.inside(reading.cancel)

    @rule(seconds=st.sampled_from([0.0005, MAX_DELAY_SECONDS, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        self.loop.settle(3)
        self.look()

    def look(self) -> None:
        if self.reading is None or not self.reading.done():
            return
        reading, self.reading = self.reading, None
        first = reading.result()
        if first is None:
            assert self.ended and not self.waiting, "the end came before what was queued"
            return
        came = numbers(first)
        assert came == list(range(self.left, self.left + len(came))), "out of order, lost or twice"
        assert len(came) <= MAX_TOGETHER + 1
        assert first.ByteSize() <= 2 * MAX_TOGETHER_BYTES + 1024, "parts travel alone"
        self.left += len(came)
        del self.waiting[: len(came)]

    @invariant()
    def nobody_waits_too_long(self) -> None:
        if not hasattr(self, "box"):
            return
        assert len(self.box._messages) == len(self.waiting)
        if self.reading is None:
            return
        assert all(delayable for _, delayable in self.waiting), "this one is urgent"
        assert len(self.waiting) < MAX_DELAYED_MESSAGES and not self.ended
        for since, _ in self.waiting:
            assert self.loop.time() - since <= MAX_DELAY_SECONDS + 1e-9, "delayable, but not for ever"

    def teardown(self) -> None:
        if hasattr(self, "box"):
            self.end()
            for _ in range(MOST + 2):
                self.reads()
            assert not self.waiting and self.left == self.put_count
        self.loop.close()
        self.patch.undo()


OutboxMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestOutbox = OutboxMachine.TestCase
