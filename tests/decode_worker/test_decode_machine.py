"""The decode worker under events in any order: messages that are late, repeated, of another epoch or about an attempt
that is over; peers that vanish; routers that ask, cancel and come back; a drain of the worker. After every event its
integrity checks hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from decode_worker import attempt as decode_attempt
from decode_worker.attempt import DecodeState
from engine.request import RequestDone
from kv_transfer.contract import HandoffState
from kv_transfer.decode_side import incoming
from kv_transfer.decode_side.ring import SlotState
from tests.decode_worker.decode_story import (
    NEW,
    REACHED,
    TRANSFERS,
    CountedMachine,
    prompt_of,
)
from tests.decode_worker.decode_world import LAYERS, DecodeWorld, Failures
from tests.decode_worker.peer_rules import ANY, PEERS, PeerRules
from tests.engine.fake_model import continuation
from wire import common_pb2

PREEMPTED = common_pb2.ATTEMPT_OUTCOME_PREEMPTED


class DecodeMachine(PeerRules):
    def __init__(self) -> None:
        super().__init__()
        # An uncaught exception is logged: by a stream that broke, by a follow-up that failed.
        self.logged = Failures()
        logging.getLogger().addHandler(self.logged)
        self.promised_dead: set[bytes] = set()  # the arbiter has said ABORTED
        self.committed: set[bytes] = set()  # by the engine

    @initialize(
        leaves_after=st.sampled_from([0, 1, 4, 12, 12]),
        blocks=st.sampled_from([10, 24]),
        overlap=st.booleans(),
    )
    def build(self, leaves_after: int, blocks: int, overlap: bool) -> None:
        # Wishes that it should: most orders would end before anything has begun.
        self.leaves_after = leaves_after

        async def make() -> DecodeWorld:
            return DecodeWorld(blocks, overlap)

        self.world = self.run(make())
        self.world.rank.on_told = self.landed.told
        self.check_aborts()
        commit = self.world.core.engine.commit

        def checked(engine_id: str, first: Any, compiled: Any = None) -> None:
            transfer_id = bytes.fromhex(engine_id)
            assert transfer_id not in self.promised_dead, "committed after the arbiter had said ABORTED"
            assert self.landed.whole(transfer_id), "committed without all of its tokens"
            # Otherwise its blocks were taken back meanwhile.
            if engine_id in self.world.core.engine._scheduler.requests:
                self.world.fill_cache(engine_id, prompt_of(transfer_id))
            commit(engine_id, first, compiled)
            self.committed.add(transfer_id)

        self.world.core.engine.commit = checked  # type: ignore[assignment, method-assign]  # wraps the real one

    def check_aborts(self) -> None:
        """Only tokens that have landed in every layer enter the prefix cache."""
        abort = self.world.core.engine.abort

        def checked(engine_id: str, verified_tokens: int = 0) -> RequestDone | None:
            if verified_tokens and engine_id in self.world.core.engine._scheduler.requests:
                transfer_id = bytes.fromhex(engine_id)
                whole = self.landed.whole_tokens(transfer_id)
                assert verified_tokens == whole, f"{verified_tokens} of {whole} tokens were kept"
                self.world.fill_cache(engine_id, prompt_of(transfer_id)[:whole])
            return abort(engine_id, verified_tokens)

        self.world.core.engine.abort = checked  # type: ignore[assignment, method-assign]  # wraps the real one

    @rule(
        peer=PEERS,
        transfer=ANY,
        lands=st.sampled_from([0, 1, LAYERS, LAYERS, LAYERS]),
        short=st.sampled_from([False, False, True]),
        said=st.sampled_from(["", "fewer", "more", "true", "true", "true"]),
        meanwhile=st.lists(st.sampled_from(["evicted", "evicted", "asked", "cancelled"]), max_size=2),
        steps=st.integers(0, NEW),
    )
    def hands_over(
        self,
        peer: str,
        transfer: bytes,
        lands: int,
        short: bool,
        said: str,
        meanwhile: list[str],
        steps: int,
    ) -> None:
        """Up to a point: so many parts land, so many are named at the end. By chance alone few would get so far.
        What happens `meanwhile` comes between a commit and the engine's turn to carry it out; so many steps follow
        before the answer is received."""
        self.connect(peer, stale=False)
        self.reserve(peer, transfer)
        ships = self.landed.held(transfer) < len(prompt_of(transfer))
        for part in range(LAYERS) if ships else ():
            self.want(peer, transfer, part)
            grants = [one for one in self.world.rank.expected if one.transfer_id == transfer]
            if part < lands and grants and grants[-1].part == part:
                self.part_lands(grants[-1], "", short)
        if not ships:
            REACHED.hit("nothing to ship")
        world = self.world
        happens = {
            "evicted": world.evict,
            "asked": lambda: world.start(self.ask(transfer)),
            "cancelled": lambda: world.start(self.ask_to_cancel(transfer)),
        }
        world.core.before_next_call += [happens[one] for one in meanwhile]
        world.core.after_next_call += [world.step] * steps
        if said:
            self.finish(peer, transfer, said)
        # Where the engine was not asked to commit.
        world.core.before_next_call, world.core.after_next_call = [], []

    @rule(peer=PEERS)
    def the_same_prompt_twice(self, peer: str) -> None:
        """For a prompt of whole blocks: after the first hand-off nothing is shipped for the second."""
        unused = [one for one in TRANSFERS[2::3] if not self.world.role.attempts.is_ended(one)]
        for transfer in unused[:2]:
            if transfer not in self.world.receiver._live:
                self.hands_over(peer, transfer, LAYERS, False, "true", [], 0)

    @rule(peer=PEERS, transfer=ANY, meanwhile=st.sampled_from(["evicted", "asked", "cancelled"]))
    def while_it_commits(self, peer: str, transfer: bytes, meanwhile: str) -> None:
        self.hands_over(peer, transfer, LAYERS, False, "true", [meanwhile], 0)

    # --- routers, and the worker itself ------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        async def go() -> None:
            self.world.start(coroutine)

        self.run(go())
        self.settle()

    @rule(transfer=ANY)
    def abort_unless_committed(self, transfer: bytes) -> None:
        self.begin(self.ask(transfer))

    async def ask(self, transfer: bytes) -> None:
        before = transfer in self.committed
        handoff = self.world.receiver._live.get(transfer)
        if handoff is not None and handoff.committing:
            REACHED.hit("commit under way")
        if await self.world.role.abort(transfer) is HandoffState.ABORTED:
            self.promised_dead.add(transfer)
            assert before or transfer not in self.committed, "ABORTED, and the engine has it"
        else:
            assert transfer in self.committed, "COMMITTED, and not in the engine"

    @rule(transfer=ANY)
    def cancel(self, transfer: bytes) -> None:
        self.begin(self.ask_to_cancel(transfer))

    async def ask_to_cancel(self, transfer: bytes) -> None:
        await self.world.role.cancel_by_router(transfer)
        assert self.world.role.attempts.get(transfer) is None, "cancelled, and there is a record of it"

    @rule(all_of_it=st.booleans())
    def leaves(self, all_of_it: bool) -> None:
        """What has not begun goes back, or everything: behind the tokens that are there, so that it goes on there."""
        self.leaves_after -= 1
        if self.leaves_after > 0:
            return
        role = self.world.role
        self.world.core.draining = True
        before = {
            one: (one.machine.state, self.world.number_of(one.transfer_id)) for one in role.attempts.all()
        }
        self.begin(role.return_all() if all_of_it else role.return_waiting())
        for attempt, (state, number) in before.items():
            if state is DecodeState.ENDED:
                continue
            if not all_of_it and state is not DecodeState.EXPECTED:
                assert attempt.machine.state is state, "more was given back than what has not begun"
            elif all_of_it and state is DecodeState.DECODING and attempt.log.ended:
                end, tokens = self.world.sent(number)
                assert (end.outcome, end.error.code) == (PREEMPTED, "DrainingError")
                expected = continuation(prompt_of(attempt.transfer_id), 1 + len(tokens))
                assert tokens in (expected[1:], expected[:-1]), (
                    "the next worker would go on at the wrong place"
                )

    @rule()
    def evict(self) -> None:
        """Running requests want the blocks of a reservation whose parts are under way."""
        self.now(self.world.evict)

    @rule()
    def step(self) -> None:
        self.now(self.world.step)

    def now(self, happens: Callable[[], object]) -> None:
        async def go() -> None:
            happens()

        self.run(go())
        self.settle()

    @rule()
    def rejoin(self) -> None:
        self.world.core.epoch += 1
        ref = common_pb2.WorkerRef(worker_id="d", epoch=self.world.core.epoch, address="d:1")
        self.begin(self.world.receiver.rejoin(ref))

    # --- what always holds -------------------------------------------------------------------------------

    @invariant()
    def accounts(self) -> None:
        if not hasattr(self, "world"):
            return
        assert not self.logged.said
        self.note()
        world = self.world
        assert set(world.rank.told) == set(world.receiver._live), (
            "a rank has other transfers than the live ones"
        )
        world.core.engine.check_integrity()
        world.receiver.check_integrity()
        for ring in world.receiver.rings:
            for slot in ring.slots:
                if slot.machine.state is SlotState.FREE:
                    assert slot.index not in world.rank.writers, "a slot is free that may be written into"
        for part in world.rank.scatters.values():
            families = world.core.engine._scheduler.requests
            owner = families[part.transfer_id.hex()][0].blocks if part.transfer_id.hex() in families else []
            blocks = world.rank.blocks[part.transfer_id]
            assert owner[: len(blocks)] == blocks, (
                "a part may be scattered into blocks that are not its request's any more"
            )
        live = {attempt.engine_id for attempt in world.role.attempts.all()}
        assert set(world.role.attempts.by_engine_id) <= live

    def teardown(self) -> None:
        try:
            self.end_every_story()
        finally:
            logging.getLogger().removeHandler(self.logged)
            self.loop.close()

    def end_every_story(self) -> None:
        """First by the routers: no block is held. Then the prefill workers exit: every slot is free."""
        if not hasattr(self, "world"):
            return
        for transfer in TRANSFERS:
            self.abort_unless_committed(transfer)
            self.cancel(transfer)
        self.answer_all()
        assert self.world.receiver.live == 0
        self.now(self.world.step)  # one may have been launched ahead
        assert not self.world.core.engine.has_work
        assert self.world.core.engine.stats().blocks_held == 0, "blocks are held without an owner"
        for peer in ("p0", "p1"):
            self.process_exits(peer)
        self.answer_all()
        stuck = [task for task in self.world.tasks if not task.done()]
        assert not stuck, stuck
        for task in self.world.tasks:
            task.result()
        (ring,) = self.world.receiver.rings
        assert ring.count(SlotState.FREE) == len(ring.slots), "a slot without a writer is not free"
        self.run(self.world.receiver.close())
        self.run(self.world.role.attempts.close())
        assert not self.logged.said

    def answer_all(self) -> None:
        """The rank has caught up."""
        for _ in range(40):
            while self.world.rank.unanswered:
                self.world.rank.answer(0)
                self.settle(4)
            self.settle(4)


def test_the_decode_worker_keeps_its_invariants_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (incoming, decode_attempt):
        monkeypatch.setattr(module, "StateMachine", CountedMachine)
    REACHED.counts.update(dict.fromkeys(REACHED.counts, 0))
    run_state_machine_as_test(DecodeMachine, settings=settings(max_examples=160, stateful_step_count=40))
    REACHED.check()
