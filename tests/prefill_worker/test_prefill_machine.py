"""The life of attempts at the prefill worker in any order of events: runs that are repeated, cancels at every point,
hand-offs that are refused or fail, engine output that comes late, a worker that leaves. Nothing stays in its queue or in
its engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.block_hash import pack_tokens
from cluster.errors import BatonError, BlocksExhaustedError, DrainingError, PeerLostError, StaleEpochError
from cluster.faults.points import NO_FAULTS
from engine.engine import Engine
from kv_transfer.base import HandoffReport
from prefill_worker.attempt import PrefillAttempt, PrefillState
from prefill_worker.role import PrefillRole
from tests.engine.fake_model import VOCAB, FakeRunner, continuation
from wire import common_pb2, prefill_pb2
from worker.validate import SpecLimits

TRANSFERS = st.sampled_from([bytes([i]) * 16 for i in range(1, 7)])
EPOCH = 1
NEW = 4


class Handoff:
    """One that ends when, and as, it is told."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.committed: asyncio.Future[None] = loop.create_future()
        self.aborted = 0
        self.finished = False

    async def start(self, request_id: str) -> None:
        """Nothing is sent."""

    async def finish(self, first_tokens: Any, report: Any) -> HandoffReport:
        assert not self.aborted
        await self.committed
        self.finished = True
        return HandoffReport(0, 10, 1, "test", 0.0)

    async def abort(self, reason: str) -> None:
        self.aborted += 1


class Sender:
    def __init__(self) -> None:
        self.asked: dict[bytes, asyncio.Future[Handoff]] = {}
        self.handoffs: dict[bytes, Handoff] = {}

    async def reserve(self, decode: Any, spec: Any, deadline_seconds: float) -> Handoff:
        loop = asyncio.get_running_loop()
        self.asked[spec.transfer_id] = loop.create_future()
        handoff = await self.asked[spec.transfer_id]
        self.handoffs[spec.transfer_id] = handoff
        return handoff


class PrefillMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.opened: dict[bytes, PrefillAttempt] = {}
        self.draining = False
        self.given_back: set[bytes] = set()

    @initialize(leaves_after=st.integers(0, 60))
    def build(self, leaves_after: int) -> None:
        self.leaves_after = leaves_after  # steps
        self.steps = 0
        self.runner = runner = FakeRunner(24, max_batch_tokens=16)
        self.engine = Engine(runner, runner.config, secret=b"s")
        self.sender = Sender()

        async def call(function: Callable[[Engine], Any]) -> Any:
            await asyncio.sleep(0)
            return function(self.engine)

        def check_epoch(epoch: int) -> None:
            if epoch != EPOCH:
                raise StaleEpochError("another epoch")

        core = SimpleNamespace(
            config=SimpleNamespace(
                engine=SimpleNamespace(max_batch_tokens=16),
                batch_aging_seconds=30.0,
                max_queued_requests=32,
                secret="s",
            ),
            faults=NO_FAULTS,
            tracing=None,
            trace_of=lambda spec: None,
            beat_step=lambda: 1,
            check_epoch=check_epoch,
            check_accepting=self.check_accepting,
            host=SimpleNamespace(call=call),
            page_size=4,
            worker_id="p",
            spec_limits=SpecLimits("m", VOCAB, 8),
        )

        async def make() -> PrefillRole:
            return PrefillRole(core, self.sender)  # type: ignore[arg-type]

        self.role = self.loop.run_until_complete(make())

    def check_accepting(self) -> None:
        if self.draining:
            raise DrainingError("draining")

    def inside(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            result = function()
            for _ in range(10):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(call())

    @rule(transfer=TRANSFERS, stale=st.sampled_from([False, False, True]), new=st.sampled_from([1, NEW]))
    def run(self, transfer: bytes, stale: bool, new: int) -> None:
        prompt = [3 + (transfer[0] * 5 + i) % 90 for i in range(4 * transfer[0])]
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        request = prefill_pb2.PrefillRunRequest(
            transfer_id=transfer,
            request_id="r",
            worker_epoch=EPOCH + stale,
            spec=common_pb2.GenerateSpec(
                model_id="m", prompt_tokens=pack_tokens(prompt), sampling=sampling, n=1, salt=bytes(16)
            ),
        )

        def go() -> None:
            with contextlib.suppress(BatonError):
                known = transfer in self.opened
                attempt = self.role.open(request)
                assert known or not self.draining, "a leaving worker took something new"
                assert self.opened.setdefault(transfer, attempt) is attempt, (
                    "a repeated Run made a second attempt"
                )

        self.inside(go)

    @rule(transfer=TRANSFERS, answer=st.sampled_from(["yes", "yes", "yes", "full", "lost"]))
    def answers_reserve(self, transfer: bytes, answer: str) -> None:
        future = self.sender.asked.get(transfer)
        if future is None or future.done():
            return
        if answer == "yes":
            self.inside(lambda: future.set_result(Handoff(self.loop)))
        else:
            error = BlocksExhaustedError("full") if answer == "full" else PeerLostError("lost")
            self.inside(lambda: future.set_exception(error))

    @rule()
    def step(self) -> None:
        if self.engine.has_work:
            self.inside(lambda: self.role.on_output(self.engine.step()))

    @rule(transfer=TRANSFERS)
    def its_logits_are_no_numbers(self, transfer: bytes) -> None:
        self.runner.sick.add(transfer.hex())

    @rule(transfer=TRANSFERS, well=st.booleans())
    def handoff_ends(self, transfer: bytes, well: bool) -> None:
        handoff = self.sender.handoffs.get(transfer)
        if handoff is None or handoff.committed.done():
            return
        if well:
            self.inside(lambda: handoff.committed.set_result(None))
        else:
            handoff.committed.add_done_callback(lambda f: f.cancelled() or f.exception())
            self.inside(lambda: handoff.committed.set_exception(PeerLostError("lost")))

    @rule(transfer=TRANSFERS)
    def cancel(self, transfer: bytes) -> None:
        attempt = self.role.attempts.get(transfer)
        if attempt is not None:
            self.loop.run_until_complete(self.role.cancel(attempt))

    @rule(all_of_it=st.booleans())
    def leaves(self, all_of_it: bool) -> None:
        """What waits goes back and nothing else, or everything; each is told that this worker leaves."""
        self.steps += 1
        if self.steps * 10 < self.leaves_after:
            return
        self.draining = True
        running = [one for one in self.role.attempts.all() if not one.log.ended]
        going = [one for one in running if all_of_it or one.machine.state is PrefillState.QUEUED]
        give_back = self.role.give_back_running if all_of_it else self.role.give_back_waiting
        self.loop.run_until_complete(give_back())
        for attempt in running:
            assert attempt.log.ended == (attempt in going), "more or less than it should was given back"
        self.given_back |= {attempt.transfer_id for attempt in going}

    @rule(transfer=TRANSFERS)
    def reader_takes_the_end(self, transfer: bytes) -> None:
        """Afterwards the attempt is forgotten, and its transfer id refused."""
        attempt = self.role.attempts.get(transfer)
        if attempt is None or not attempt.log.ended:
            return

        async def read() -> list[Any]:
            return [event async for event in self.role.attempts.read(attempt)]

        events = self.loop.run_until_complete(read())
        assert [event.WhichOneof("event") for event in events][-1] == "end"
        if transfer in self.given_back:
            assert events[-1].end.error.code == "DrainingError", "the router would not know why"
        assert self.role.attempts.is_ended(transfer)

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "role"):
            return
        self.engine.check_integrity()
        for transfer, attempt in self.opened.items():
            state, handoff = attempt.machine.state, self.sender.handoffs.get(transfer)
            over = attempt.task is not None and attempt.task.done()
            assert over == attempt.log.ended
            if over:
                assert state in (PrefillState.RELEASED, PrefillState.DRAINED, PrefillState.QUEUED)
            if handoff is not None and over:
                assert handoff.finished != bool(handoff.aborted), "a hand-off ends once: finished, or aborted"
            if state is PrefillState.RELEASED and attempt.tokens[0].finish is None:
                prompt = [3 + (transfer[0] * 5 + i) % 90 for i in range(4 * transfer[0])]
                assert [token.token_id for token in attempt.tokens] == continuation(prompt, 1)

    def teardown(self) -> None:
        try:
            if hasattr(self, "role"):
                self.end_every_story()
        finally:
            self.loop.close()

    def end_every_story(self) -> None:
        for transfer in self.opened:
            self.cancel(transfer)
        self.whole()
        assert self.engine.stats().blocks_held == 0, "blocks are held that nobody owns"
        assert not self.role._by_engine_id
        # Whoever comes next is let in at once: what was admitted has been given back.
        assert self.role.admission.inside_tokens == 0
        self.loop.run_until_complete(self.role.attempts.close())


PrefillMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPrefillWorker = PrefillMachine.TestCase
