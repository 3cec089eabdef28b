"""Drained messages to decode workers that come, go, hang, change epochs, and read without acting: each message is repeated
to its worker until it is acknowledged, however long that takes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.errors import PeerLostError, StaleEpochError
from kv_transfer.prefill_side.pending_drain_notices import TRIES, TRY_SECONDS, PendingDrainNotices
from tests.harness.reached import Reached
from tests.harness.virtual_time import VirtualLoop
from wire import common_pb2

REACHED = Reached(
    [
        "said at once",
        "kept without a stream",
        "said on a new stream",
        "acts at once",
        "acknowledged late",
        "given up",
    ]
)
WORKERS = st.sampled_from(["d0", "d1"])


@dataclass(eq=False)
class Worker:
    """As P sees it: whether it answers, and how."""

    worker_id: str
    epoch: int = 1
    known: int = 0  # the epoch that P has last read
    answers: str = "yes"  # | "no" | "never"
    acts: bool = True  # acts on what it reads and acknowledges it
    received: list[bytes] = field(default_factory=list)
    acted: set[bytes] = field(default_factory=set)
    acknowledge: Any = None

    def send_drained(self, transfer_id: bytes) -> None:
        assert self.answers == "yes", "said to one that is not there"
        assert transfer_id not in self.acted, "said again after it was acknowledged"
        self.received.append(transfer_id)
        if self.acts:
            self.act()

    def act(self) -> None:
        for transfer_id in self.received:
            self.acted.add(transfer_id)
            self.acknowledge(self.worker_id, transfer_id)


class PendingDrainNoticesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.workers = {name: Worker(name) for name in ("d0", "d1")}
        self.kept: dict[str, list[tuple[bytes, float]]] = {"d0": [], "d1": []}  # (what, when)
        self.away_since: dict[str, float | None] = {"d0": None, "d1": None}
        self.number = 0

    @initialize()
    def build(self) -> None:
        async def make() -> PendingDrainNotices:
            return PendingDrainNotices(self.open, lambda ref: self.workers[ref.worker_id].known)

        self.notices = self.loop.run(make())
        for worker in self.workers.values():
            worker.acknowledge = self.notices.acknowledged

    async def open(self, decode: common_pb2.WorkerRef) -> Worker:
        worker = self.workers[decode.worker_id]
        if worker.answers == "never":
            await asyncio.Event().wait()
        if worker.answers == "no":
            raise PeerLostError("gone")
        worker.known = worker.epoch
        if decode.epoch != worker.epoch:
            raise StaleEpochError("another epoch", field="decode_epoch")
        return worker

    def inside(self, function: Any, *arguments: Any) -> None:
        async def call() -> None:
            function(*arguments)

        self.loop.run(call())
        self.loop.settle(4)

    @rule(name=WORKERS, stale=st.integers(0, 2), count=st.integers(1, 3))
    def is_drained(self, name: str, stale: int, count: int) -> None:
        """The hand-off was with an earlier life, perhaps."""
        worker = self.workers[name]
        ref = common_pb2.WorkerRef(worker_id=name, epoch=max(1, worker.epoch - stale), address="a")
        for _ in range(count):
            self.number += 1
            transfer_id = self.number.to_bytes(16, "big")
            self.kept[name].append((transfer_id, self.loop.time()))
            stream = worker if worker.answers == "yes" and not stale else None
            self.inside(self.notices.keep, ref, transfer_id, stream)
            REACHED.hit("said at once" if stream is not None else "kept without a stream")

    @rule(name=WORKERS, acts=st.booleans())
    def reads_without_acting(self, name: str, acts: bool) -> None:
        """Or acts at last on what it has read."""
        worker = self.workers[name]
        worker.acts = acts
        if acts:
            REACHED.hit("acknowledged late" if worker.received and self.missing(name) else "acts at once")
            self.inside(worker.act)

    @rule(name=WORKERS, answers=st.sampled_from(["yes", "yes", "no", "never"]))
    def changes(self, name: str, answers: str) -> None:
        self.workers[name].answers = answers
        self.away_since[name] = None if answers == "yes" else self.away_since[name] or self.loop.time()

    @rule(name=WORKERS)
    def lives_again(self, name: str) -> None:
        self.workers[name].epoch += 1

    @rule(name=WORKERS)
    def another_hand_off_opens_a_stream(self, name: str) -> None:
        """Also while the notices are on their way by itself."""
        worker = self.workers[name]
        if worker.answers == "yes":
            worker.known = worker.epoch
            ref = common_pb2.WorkerRef(worker_id=name, epoch=worker.epoch, address="a")
            if self.missing(name):
                REACHED.hit("said on a new stream")
            self.inside(self.notices.hand_over, ref, worker)
            assert not self.undelivered(name), "the stream is up, and a notice is missing"

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 3.0 * TRIES * TRY_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.loop.pass_time(seconds)
        for name, since in self.away_since.items():
            if since is None and seconds >= 10.0 and name not in self.notices._given_up:
                # A try takes a second, the pause behind it another; a new epoch costs one more.
                assert not self.undelivered(name), "it can be reached, and a notice is missing"
                if self.workers[name].acts:
                    assert not self.missing(name), "it has acted, and was not believed"
            if seconds > 2.5 * TRIES * TRY_SECONDS:
                tried = name in self.notices._delivering
                assert not tried or self.workers[name].answers == "yes", "it is tried for ever"
            if name in self.notices._given_up:
                REACHED.hit("given up")

    def missing(self, name: str) -> set[bytes]:
        """Messages that the worker has not acknowledged."""
        return {transfer for transfer, _ in self.kept[name]} - self.workers[name].acted

    def undelivered(self, name: str) -> set[bytes]:
        return {transfer for transfer, _ in self.kept[name]} - set(self.workers[name].received)

    @invariant()
    def each_is_said_to_the_right_one(self) -> None:
        for name, worker in self.workers.items():
            assert set(worker.received) <= {transfer for transfer, _ in self.kept[name]}, "another's"

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not hasattr(self, "notices"):
            return
        for name in self.workers:
            assert set(self.notices._waiting.get(name, ())) == self.missing(name)
            if self.missing(name):
                on_its_way, given_up = name in self.notices._delivering, name in self.notices._given_up
                assert on_its_way or given_up, "it is not delivered"
                assert not given_up or self.was_long_away(name), "given up at once"

    def was_long_away(self, name: str) -> bool:
        """Seconds since the oldest undelivered notice. The last tries may have been under an old epoch."""
        oldest = min(when for transfer, when in self.kept[name] if transfer in self.missing(name))
        return self.loop.time() - oldest >= (TRIES - 3) * TRY_SECONDS

    def teardown(self) -> None:
        for name in self.workers:
            self.changes(name, "yes")
            if hasattr(self, "notices"):
                self.reads_without_acting(name, True)
        if hasattr(self, "notices"):
            self.time_passes(3.0 * TRIES * TRY_SECONDS)
            for name in self.workers:
                self.another_hand_off_opens_a_stream(name)
                assert not self.notices.waits_for(name), "not acknowledged in the end"
        self.loop.close()


PendingDrainNoticesMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None
)


class TestPendingDrainNotices(PendingDrainNoticesMachine.TestCase):  # type: ignore[valid-type, misc]  # made by Hypothesis
    @classmethod
    def tearDownClass(cls) -> None:
        super().tearDownClass()
        REACHED.check()
