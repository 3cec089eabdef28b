"""The batch queue in any order of producers, ends, errors, a reader that comes, goes and is cut off: nothing is lost,
doubled or out of order, producers hear exactly when it is drained, and no wait is without a reason."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.dispatch.batch_queue import BatchQueue
from tests.harness.virtual_time import VirtualLoop

PRODUCERS = 3
WHICH = st.integers(0, PRODUCERS - 1)


class Broken(Exception):
    """What `fail` is given."""


class BatchQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()

    @initialize(
        pace=st.sampled_from([0.0, 0.0, 0.01]),
        story=st.sampled_from(["whole", "whole", "fails", "discarded"]),
    )
    def build(self, pace: float, story: str) -> None:
        async def make() -> BatchQueue[tuple[int, int]]:
            made: BatchQueue[tuple[int, int]] = BatchQueue(PRODUCERS, pace)
            made.when_drained(self.is_drained)
            return made

        self.pace = pace
        self.story = story  # how it ends: most orders would else end before anything has happened
        self.box = self.loop.run(make())
        self.said = [0] * PRODUCERS  # numbers that each has put
        self.taken = [0] * PRODUCERS  # and that have been read
        self.batches: list[float] = []  # when
        self.ended: set[int] = set()
        self.drained = 0
        self.reading: asyncio.Task[list[tuple[int, int]]] | None = None
        self.error: Broken | None = None
        self.discarded = self.over = False

    def inside(self, function: Any, *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self.loop.run(call())
        self.loop.settle()
        self.look()

    @rule(which=WHICH)
    def puts(self, which: int) -> None:
        if which in self.ended or self.error is not None:
            return

        def put() -> None:
            self.box.add((which, self.said[which]))
            self.said[which] += 1

        self.inside(put)

    @rule(which=WHICH)
    def ends(self, which: int) -> None:
        if which in self.ended or self.said[which] < which:
            return
        self.ended.add(which)
        self.inside(self.box.end)

    @rule(which=WHICH, count=st.integers(1, 3))
    def a_burst_meets_a_reader(self, which: int, count: int) -> None:
        """By chance alone few readers would be there when something comes."""
        for number in range(count):
            self.reads()
            self.puts((which + number) % PRODUCERS)

    @rule()
    def all_end_while_one_reads(self) -> None:
        if sum(self.said) > 3:
            self.reads()
            for which in range(PRODUCERS):
                self.ends(which)

    @rule(again=st.booleans())
    def fails(self, again: bool) -> None:
        """The first error counts, however many follow."""
        if self.story != "fails" or sum(self.said) < 2:
            return
        error = Broken()
        self.error = self.error or error
        self.inside(self.box.fail, error)
        if again:
            self.inside(self.box.fail, Broken())

    @rule()
    def is_discarded(self) -> None:
        if self.story != "discarded" or sum(self.said) < 2:
            return
        error = Broken()
        self.error = self.error or error
        self.discarded = True
        self.taken = list(self.said)
        self.inside(self.box.discard, error)

    @rule()
    def reads(self) -> None:
        if self.reading is None and not self.over:

            def read() -> None:
                self.drained = 0
                self.reading = self.loop.create_task(self.take())

            self.inside(read)

    def is_drained(self) -> None:
        assert self.taken == self.said, "something lies unread"
        self.drained += 1
        self.box.when_drained(self.is_drained)  # it is called once

    async def take(self) -> list[tuple[int, int]]:
        batch = await self.box.take()
        self.took = self.loop.time()
        return batch

    @rule()
    def the_reader_is_cut_off(self) -> None:
        """What was not handed to it is there for the next one."""
        if self.reading is not None:
            reading, self.reading = self.reading, None
            self.inside(reading.cancel)
            assert reading.cancelled()

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.0]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        self.look()

    def look(self) -> None:
        """What the reader got."""
        reading = self.reading
        if reading is None or not reading.done():
            return
        self.reading = None
        failed = reading.exception()
        if failed is not None:
            assert failed is self.error, "the first error counts"
            assert self.taken == self.said, "an error came before what was there"
            return
        batch = reading.result()
        if not batch:
            assert len(self.ended) == PRODUCERS and self.taken == self.said, (
                "the end, and something is missing"
            )
            self.over = True
            return
        self.count(batch)

    def count(self, batch: list[tuple[int, int]]) -> None:
        assert not self.discarded, "it was discarded before"
        for which, number in batch:
            assert number == self.taken[which], "out of order, lost or twice"
            self.taken[which] += 1
        last = len(self.ended) == PRODUCERS or self.error is not None
        if self.pace and self.batches and not last:
            assert self.took - self.batches[-1] >= self.pace - 1e-9, "faster than its pace"
        self.batches.append(self.took)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if not hasattr(self, "box"):
            return
        unread = sum(self.said) - sum(self.taken)
        assert unread == len(self.box._items)
        if self.reading is not None and self.pace == 0.0:
            assert unread == 0 and self.error is None, "a reader waits, and something is there"
            assert len(self.ended) < PRODUCERS
            assert self.drained, "a reader waits for producers, and they have not heard of it"

    def teardown(self) -> None:
        if hasattr(self, "box"):
            self.end_every_story()
        self.loop.close()

    def end_every_story(self) -> None:
        """Read to the end everything has come, once, or the error."""
        for _ in range(50):
            self.reads()
            self.time_passes(1.0)
            for which in range(PRODUCERS):
                if which not in self.ended:
                    self.ended.add(which)
                    self.inside(self.box.end)
            if self.over or (self.error is not None and self.taken == self.said):
                break
        assert self.taken == self.said
        if self.reading is not None:
            self.the_reader_is_cut_off()


BatchQueueMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestBatchQueue = BatchQueueMachine.TestCase
