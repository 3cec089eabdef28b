"""A router's view of its workers' liveness, in any order: streams that open, send, are not read, go silent and end;
workers that come back under another epoch. A worker is suspect and lost when it is silent, and no other is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from router.dispatch.liveness import WATCH_SECONDS, Liveness, Watch

from cluster.protocol.times import LOST_SECONDS, SUSPECT_SECONDS
from router.dispatch import liveness as module
from router.link.backoff import MOST_SECONDS
from tests.harness.virtual_time import VirtualLoop

WORKERS = st.sampled_from(["d0", "d1"])
EPOCHS = st.integers(1, 2)
PICK = st.integers(0, 50)
# The look that notices comes up to this much later, and sees what was true a moment before.
SLACK = 2.5 * WATCH_SECONDS


@dataclass(eq=False)
class Stream:
    """The model of one stream: when its last message came, and since when it has not been read."""

    worker: str
    epoch: int
    opened: float
    last: float
    paused: bool = False
    lost: int = 0
    ending: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    watch: Watch | None = None


class LivenessMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        clock = mock.Mock(monotonic=self.loop.time)
        self.patch = mock.patch.object(module, "time", clock)
        self.patch.start()
        self.liveness = Liveness()
        self.streams: list[Stream] = []
        self.responded: dict[tuple[str, int], float] = {}  # of each life that has streams
        self.lost_at: dict[tuple[str, int], float] = {}  # of each life, the last time

    def picked(self, number: int) -> Stream | None:
        return self.streams[number % len(self.streams)] if self.streams else None

    def of(self, stream: Stream) -> list[Stream]:
        """All streams to the same life."""
        mine = (stream.worker, stream.epoch)
        return [one for one in self.streams if (one.worker, one.epoch) == mine]

    def inside(self, function: Any, *arguments: Any) -> Any:
        async def call() -> Any:
            return function(*arguments)

        return self.loop.run(call())

    @rule(worker=WORKERS, epoch=EPOCHS)
    def opens(self, worker: str, epoch: int) -> None:
        now = self.loop.time()
        stream = Stream(worker, epoch, now, now)

        def on_lost() -> None:
            stream.lost += 1
            self.lost_at[worker, epoch] = self.loop.time()
            assert self.may_be_lost(stream), "lost, although a message came in time"

        watching = self.liveness.watch(f"{worker}@{epoch}", on_lost)
        stream.watch = self.inside(stream.ending.enter_context, watching)
        self.responded.setdefault((worker, epoch), now)
        self.streams.append(stream)

    @rule(number=PICK)
    def speaks(self, number: int) -> None:
        stream = self.picked(number)
        if stream is not None and stream.watch is not None:
            self.inside(stream.watch.responded)
            stream.last = self.responded[stream.worker, stream.epoch] = self.loop.time()

    @rule(number=PICK)
    def is_not_read(self, number: int) -> None:
        """Twice is as good as once."""
        stream = self.picked(number)
        if stream is not None and stream.watch is not None:
            self.inside(stream.watch.pause)
            stream.paused = True

    @rule(number=PICK)
    def is_read_again(self, number: int) -> None:
        stream = self.picked(number)
        if stream is not None and stream.watch is not None:
            self.inside(stream.watch.resume)
            stream.paused = False
            stream.last = self.responded[stream.worker, stream.epoch] = self.loop.time()

    @rule(number=PICK)
    def ends(self, number: int) -> None:
        stream = self.picked(number)
        if stream is None:
            return
        self.streams.remove(stream)
        self.inside(stream.ending.close)
        if not self.of(stream):
            del self.responded[stream.worker, stream.epoch]

    @rule(seconds=st.sampled_from([0.05, 0.5, 1.0, SUSPECT_SECONDS, LOST_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        for stream in self.streams:
            if self.must_be_lost(stream):
                assert stream.lost, "silent for too long, and not reported as lost"

    def read(self, stream: Stream) -> bool:
        """None of its worker's streams is unread: else it might have sent something."""
        return not any(one.paused for one in self.of(stream))

    def silence(self, stream: Stream) -> tuple[float, float]:
        """Of the stream, and of its worker (0 while one of its streams is not read)."""
        now = self.loop.time()
        own = 0.0 if stream.paused else now - stream.last
        return own, now - self.responded[stream.worker, stream.epoch] if self.read(stream) else 0.0

    def may_be_lost(self, stream: Stream) -> bool:
        return max(self.silence(stream)) > LOST_SECONDS - 1e-6

    def must_be_lost(self, stream: Stream) -> bool:
        """One that was opened a moment ago may not have been looked at yet."""
        looked = self.loop.time() - stream.opened > SLACK
        return looked and max(self.silence(stream)) > LOST_SECONDS + SLACK

    @invariant()
    def suspects_are_those_who_are_silent_or_were_lost(self) -> None:
        suspects, now = self.inside(lambda: self.liveness.suspects), self.loop.time()
        for stream in self.streams:
            silent = self.silence(stream)[1]
            if silent > SUSPECT_SECONDS + 1e-6:
                assert f"{stream.worker}@{stream.epoch}" in suspects
            elif silent < SUSPECT_SECONDS - 1e-6 and (stream.worker, stream.epoch) not in self.lost_at:
                assert f"{stream.worker}@{stream.epoch}" not in suspects
        known = {(one.worker, one.epoch) for one in self.streams}
        recent = {
            dispatcher
            for dispatcher, lost in self.lost_at.items()
            if now - lost <= MOST_SECONDS + WATCH_SECONDS
        }
        assert suspects <= {f"{worker}@{epoch}" for worker, epoch in known | recent}
        assert self.liveness.silent() + len(recent) >= len(suspects)

    @invariant()
    def nothing_is_kept_of_who_is_gone(self) -> None:
        dispatchers = {f"{one.worker}@{one.epoch}" for one in self.streams}
        assert set(self.liveness._workers) == dispatchers

    def teardown(self) -> None:
        while self.streams:
            self.ends(0)
        self.loop.pass_time(2 * WATCH_SECONDS)
        assert self.liveness._timer is None, "a timer runs without a stream"
        self.patch.stop()
        self.loop.close()


LivenessMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLiveness = LivenessMachine.TestCase
