"""A prefill worker's attempts as a state machine, between an engine of the fake model and a stub of hand-offs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.errors import (
    BatonError,
    BlocksExhaustedError,
    DrainingError,
    PeerLostError,
    StaleEpochError,
    StaleTransferError,
)
from cluster.protocol.block_hash import pack_tokens
from engine.engine import Engine
from kv_transfer.contract import HandoffReport
from prefill_worker.attempt import PrefillAttempt, PrefillState
from prefill_worker.role import PrefillRole
from tests.engine.fake_model import FakeRunner, continuation
from tests.harness.linked_router import LinkedRouter
from tests.harness.reached import Reached
from tests.harness.virtual_time import VirtualLoop
from tests.prefill_worker.fake_parts import fake_parts
from wire import common_pb2, link_pb2, prefill_pb2

REACHED = Reached(
    [
        *("queued → admitted", "admitted → computing", "admitted → draining"),
        *("computing → sent", "computing → released", "computing → draining"),
        *("sent → released", "sent → draining", "draining → drained"),
        *("run refused: another epoch", "run refused: leaving", "run refused: it has ended", "run repeated"),
        *("reserve refused: full", "reserve refused: lost", "nothing reserved", "hand-off dropped"),
        *(
            "hand-off failed",
            "cancelled",
            "given back",
            "blocks kept for writes",
            "blocks freed after writes",
        ),
    ]
)
EPOCH = 1
NEW = 4
PICKS = st.integers(0, 50)  # among those there are


def prompt_of(transfer: bytes) -> list[int]:
    return [3 + (transfer[0] * 5 + i) % 90 for i in range(4 * (1 + transfer[0] % 6))]


class Handoff:
    """One that ends when, and as, the test sets."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.committed: asyncio.Future[None] = loop.create_future()
        self.all_drained: asyncio.Future[None] = loop.create_future()
        self.aborted = 0
        self.discarded = False
        self.finished = False

    @property
    def over(self) -> bool:
        return self.finished or self.aborted > 0

    async def start(self, request_id: str, part_times: object = None) -> None:
        """Nothing is sent."""

    async def drained(self) -> None:
        await asyncio.shield(self.all_drained)

    async def finish(self, first_tokens: Any, report: Any) -> HandoffReport:
        assert not self.aborted
        await self.committed
        self.finished = True
        return HandoffReport(0, 10, 1, "test", 0.0)

    async def abort(self, reason: str, *, discard: bool = False) -> None:
        self.aborted += 1
        self.discarded = discard


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
        self.loop = VirtualLoop()
        self.number = 0
        self.opened: dict[bytes, PrefillAttempt] = {}
        self.draining = False
        self.returned: set[bytes] = set()

    @initialize(leaves_after=st.sampled_from([10, 60, 10_000]))
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

        parts = fake_parts(
            call,
            max_batch_tokens=16,
            page_size=4,
            check_epoch=check_epoch,
            check_accepting=self.check_accepting,
        )

        async def make() -> PrefillRole:
            return PrefillRole(parts, self.sender)  # type: ignore[arg-type]

        self.role = self.loop.run_until_complete(make())

        async def read() -> LinkedRouter:
            return LinkedRouter(self.role.routers, reads=False)

        self.router = self.loop.run_until_complete(read())
        self.numbers: dict[bytes, int] = {}  # of handles

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

    @precondition(lambda self: len(self.role.attempts) < 8)
    @rule(
        stale=st.sampled_from([0, 0, 0, 1, -1]),
        new=st.sampled_from([1, NEW, NEW]),
        stops=st.sampled_from([False, False, True]),
    )
    def run(self, stale: int, new: int, stops: bool) -> None:
        """`stops`: ends with its first token by a stop token, which is known only once it is drawn."""
        self.number += 1
        self.say_run(bytes([self.number]) * 16, stale, new, stops)

    def say_run(self, transfer: bytes, stale: int, new: int, stops: bool) -> None:
        prompt = prompt_of(transfer)
        sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        if stops:
            sampling.stop_token_ids.append(continuation(prompt, 1)[0])
        handle = self.router.handle()
        request = prefill_pb2.PrefillRunRequest(
            transfer_id=transfer,
            request_id="r",
            worker_epoch=EPOCH + stale,
            handle=handle,
            spec=common_pb2.GenerateSpec(
                model_id="m", prompt_tokens=pack_tokens(prompt), sampling=sampling, n=1, salt=bytes(16)
            ),
        )

        def go() -> None:
            known = self.role.attempts.get(transfer)
            ended = self.role.attempts.is_ended(transfer)
            try:
                attempt = self.role.open(request)
            except BatonError as error:
                assert known is None, "a repeated Run was refused"
                self.refused(error, stale, ended)
                return
            assert known is attempt or not (stale or self.draining or ended), "it took what it should not"
            if known is not None:
                assert known is attempt, "a repeated Run made a second attempt"
                REACHED.hit("run repeated")
                return
            self.opened[transfer] = attempt
            self.numbers[transfer] = handle.number
            REACHED.count(attempt.machine)

        self.inside(go)

    def refused(self, error: BatonError, stale: int, ended: bool) -> None:
        """The epoch is checked first: a message to another epoch has no other effect."""
        if stale:
            assert isinstance(error, StaleEpochError), "taken for this life's"
            REACHED.hit("run refused: another epoch")
        elif self.draining:
            assert isinstance(error, DrainingError)
            REACHED.hit("run refused: leaving")
        else:
            assert ended and isinstance(error, StaleTransferError)
            REACHED.hit("run refused: it has ended")

    @precondition(lambda self: bool(self.opened))
    @rule(pick=PICKS, stale=st.sampled_from([0, 1]))
    def run_again(self, pick: int, stale: int) -> None:
        """A repeated Run: while the attempt runs, after its end, or with an outdated epoch."""
        ended = [transfer for transfer in self.opened if self.role.attempts.is_ended(transfer)]
        known = [*self.opened, *3 * ended]
        self.say_run(known[pick % len(known)], stale, NEW, stops=False)

    @precondition(lambda self: any(not future.done() for future in self.sender.asked.values()))
    @rule(pick=PICKS, answer=st.sampled_from(["yes", "full", "yes", "lost", "yes"]))
    def answers_reserve(self, pick: int, answer: str) -> None:
        asked = [future for future in self.sender.asked.values() if not future.done()]
        future = asked[pick % len(asked)]
        if answer == "yes":
            self.inside(lambda: future.set_result(Handoff(self.loop)))
        else:
            error = BlocksExhaustedError("full") if answer == "full" else PeerLostError("lost")
            REACHED.hit(f"reserve refused: {answer}")
            self.inside(lambda: future.set_exception(error))

    @precondition(lambda self: self.engine.has_work)
    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.inside(lambda: self.role.on_output(self.engine.step()))

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def steps_to_the_end(self) -> None:
        """Whole prompts: their hand-offs are sent."""
        for _ in range(20):
            if self.engine.has_work:
                self.step(1)

    @precondition(lambda self: bool(self.opened))
    @rule(pick=PICKS, really=st.sampled_from([True, *[False] * 3]))
    def its_logits_are_no_numbers(self, pick: int, really: bool) -> None:
        if really:  # sometimes only, so that most attempts are computed
            self.runner.sick.add(list(self.opened)[pick % len(self.opened)].hex())

    def going(self, *, sent: bool) -> list[tuple[bytes, Handoff]]:
        return [
            (transfer, handoff)
            for transfer, handoff in self.sender.handoffs.items()
            if not handoff.committed.done()
            and (not sent or self.opened[transfer].machine.state is PrefillState.SENT)
        ]

    @precondition(lambda self: bool(self.going(sent=False)))
    @rule(pick=PICKS, well=st.booleans(), early=st.booleans())
    def handoff_ends(self, pick: int, well: bool, early: bool) -> None:
        """D commits or aborts a hand-off; it may abort at any time, and commits only after Finish."""
        going = self.going(sent=well or not early) or self.going(sent=False)
        transfer, handoff = going[pick % len(going)]
        well = well and self.opened[transfer].machine.state is PrefillState.SENT
        if well:
            self.inside(lambda: handoff.committed.set_result(None))
        else:
            handoff.committed.add_done_callback(lambda f: f.cancelled() or f.exception())
            if self.opened[transfer].machine.state is PrefillState.SENT:
                REACHED.hit("hand-off failed")
            self.inside(lambda: handoff.committed.set_exception(PeerLostError("lost")))

    def written_to(self) -> list[bytes]:
        """Ended hand-offs with pending writes."""
        handoffs = self.sender.handoffs
        return [name for name, one in handoffs.items() if one.over and not one.all_drained.done()]

    @precondition(lambda self: bool(self.written_to()))
    @rule(pick=PICKS)
    def writes_end(self, pick: int) -> None:
        """All ranks report the writes as ended, possibly long after the hand-off."""
        over = self.written_to()
        transfer = over[pick % len(over)]
        handoff = self.sender.handoffs[transfer]
        attempt = self.opened[transfer]
        kept = attempt.engine_id in self.engine._scheduler.requests
        self.inside(lambda: handoff.all_drained.set_result(None))
        if attempt.log.ended:
            assert attempt.freed.is_set() and attempt.engine_id not in self.engine._scheduler.requests
            if kept:
                REACHED.hit("blocks freed after writes")

    @precondition(lambda self: bool(self.opened))
    @rule(pick=PICKS, really=st.sampled_from([True, *[False] * 7]))
    def router_cancels(self, pick: int, really: bool) -> None:
        if really:  # sometimes only, so that some attempts run to their end
            self.cancel(list(self.opened)[pick % len(self.opened)])

    def cancel(self, transfer: bytes) -> None:
        attempt = self.role.attempts.get(transfer)
        if attempt is not None:
            if not attempt.log.ended:
                REACHED.hit("cancelled")
            self.loop.run_until_complete(self.role.cancel(attempt))
            assert attempt.log.ended, "it goes on, whatever its writes do"

    @rule(all_of_it=st.booleans())
    def leaves(self, all_of_it: bool) -> None:
        """What waits goes back and nothing else, or everything; each gets a DrainingError."""
        self.steps += 1
        if self.steps * 10 < self.leaves_after:
            return
        self.draining = True
        running = [one for one in self.role.attempts.all() if not one.log.ended]
        going = [one for one in running if all_of_it or one.machine.state is PrefillState.QUEUED]
        returns = self.role.return_all if all_of_it else self.role.return_waiting
        self.loop.run_until_complete(returns())
        for attempt in running:
            assert attempt.log.ended == (attempt in going), "more or less than it should was given back"
        self.returned |= {attempt.transfer_id for attempt in going}
        if going:
            REACHED.hit("given back")

    def ended(self) -> list[PrefillAttempt]:
        return [one for one in self.role.attempts.all() if one.log.ended]

    @precondition(lambda self: bool(self.ended()))
    @rule(pick=PICKS)
    def reader_takes_the_end(self, pick: int) -> None:
        """Afterwards the attempt is forgotten, and its transfer id refused."""
        attempt = self.ended()[pick % len(self.ended())]
        transfer = attempt.transfer_id
        number = self.numbers[transfer]
        self.inside(lambda: None)
        end = self.router.ends[number]
        if transfer in self.returned:
            assert end.error.code == "DrainingError", "the router would not get the reason"
        self.inside(lambda: self.router.send(link_pb2.RouterFrame(close=[number])))
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
                self.keeps_blocks(attempt, handoff)
            if transfer not in self.sender.asked and state is PrefillState.RELEASED:
                assert attempt.request.spec.sampling.max_tokens == 1
                REACHED.hit("nothing reserved")
            elif state is PrefillState.RELEASED and handoff is not None and handoff.aborted:
                assert attempt.tokens[0].finish is not None
                REACHED.hit("hand-off dropped")
            if state is PrefillState.RELEASED and attempt.tokens[0].finish is None:
                prompt = prompt_of(transfer)
                assert [token.token_id for token in attempt.tokens] == continuation(prompt, 1)

    def keeps_blocks(self, attempt: PrefillAttempt, handoff: Handoff) -> None:
        """Blocks that a write may still read stay allocated, and the request is no longer computed."""
        sequences = self.engine._scheduler.requests.get(attempt.engine_id, [])
        if handoff.all_drained.done():
            return
        assert not attempt.freed.is_set(), "given back while a write reads"
        assert all(sequence not in self.engine._scheduler.running for sequence in sequences)
        if any(sequence.blocks for sequence in sequences):
            REACHED.hit("blocks kept for writes")

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
        while self.written_to():
            self.writes_end(0)
        assert self.engine.stats().blocks_held == 0, "blocks are held without an owner"
        assert not self.role.prefilling.by_engine_id
        # The next one is admitted at once: what was admitted has been given back.
        assert self.role.prefilling.admission.inside_tokens == 0
        self.loop.run_until_complete(self.role.attempts.close())
