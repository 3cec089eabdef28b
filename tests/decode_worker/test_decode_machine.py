"""The decode worker's side of everything, in any order: messages that are late, repeated, of another epoch or about an
attempt that is over; peers that vanish; routers that ask, cancel, come back; the worker told to leave. After every event
the accounts hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.block_hash import pack_tokens
from cluster.errors import BatonError
from decode_worker.attempt import DecodeState
from kv_transfer import messages as m
from kv_transfer.base import HandoffState
from kv_transfer.ring import SlotState
from tests.decode_worker.decode_world import LAYERS, DecodeWorld, Failures, Stream
from tests.engine.fake_model import continuation
from wire import common_pb2, decode_pb2, handoff_pb2

TRANSFERS = st.sampled_from([bytes([i]) * 16 for i in range(1, 4)])
PEERS = st.sampled_from(["p0", "p1"])
SALT = bytes(16)
NEW = 6
PREEMPTED = common_pb2.ATTEMPT_OUTCOME_PREEMPTED


def prompt_of(transfer_id: bytes) -> list[int]:
    return [3 + (transfer_id[0] * 7 + i) % 90 for i in range(5 + transfer_id[0])]


def spec_of(transfer_id: bytes) -> common_pb2.GenerateSpec:
    sampling = common_pb2.SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    prompt = pack_tokens(prompt_of(transfer_id))
    return common_pb2.GenerateSpec(model_id="m", prompt_tokens=prompt, sampling=sampling, n=1, salt=SALT)


class DecodeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        # An exception that nobody catches is logged: by a stream that broke, by a follow-up that failed.
        self.logged = Failures()
        logging.getLogger().addHandler(self.logged)
        self.streams: dict[str, Stream] = {}
        self.lives = {"p0": 1, "p1": 1}  # epochs of the peers
        self.landed: dict[bytes, set[int]] = {}  # parts that were verified, by the rank's word
        self.promised_dead: set[bytes] = set()  # the arbiter has said ABORTED
        self.committed: set[bytes] = set()  # by the engine

    @initialize(leaves_after=st.integers(0, 12))
    def build(self, leaves_after: int) -> None:
        # Wishes that it should: most orders would end before anything has begun.
        self.leaves_after = leaves_after

        async def make() -> DecodeWorld:
            return DecodeWorld()

        self.world = self.run(make())
        commit = self.world.core.engine.commit

        def checked(engine_id: str, first: Any) -> None:
            transfer_id = bytes.fromhex(engine_id)
            assert transfer_id not in self.promised_dead, "committed after the arbiter had said ABORTED"
            assert self.landed.get(transfer_id) == set(range(LAYERS)), "committed without all of its parts"
            if engine_id in self.world.core.engine._requests:  # or its blocks were taken back meanwhile
                self.world.fill_cache(engine_id, prompt_of(transfer_id))
            commit(engine_id, first)
            self.committed.add(transfer_id)

        self.world.core.engine.commit = checked  # type: ignore[method-assign]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    def settle(self, turns: int = 12) -> None:
        async def pause() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(pause())

    # --- the prefill workers -----------------------------------------------------------------------------

    @rule(peer=PEERS, stale=st.booleans())
    def connect(self, peer: str, stale: bool) -> None:
        async def go() -> None:
            epoch = self.world.core.epoch + (9 if stale else 0)
            self.streams[peer] = self.world.connect(peer, self.lives[peer], epoch)

        if peer in self.streams and self.streams[peer].open:
            return
        self.run(go())
        self.settle()

    def say(self, peer: str, **message: Any) -> None:
        if peer in self.streams and self.streams[peer].open:
            self.streams[peer].say(**message)
            self.settle()

    @rule(peer=PEERS, transfer=TRANSFERS)
    def reserve(self, peer: str, transfer: bytes) -> None:
        prompt = prompt_of(transfer)
        reserve = handoff_pb2.Reserve(
            transfer_id=transfer,
            request_id="r",
            spec=spec_of(transfer),
            token_count=len(prompt),
        )
        self.say(peer, reserve=reserve)

    @rule(peer=PEERS, transfer=TRANSFERS, part=st.integers(0, LAYERS - 1))
    def want(self, peer: str, transfer: bytes, part: int) -> None:
        self.say(peer, slot_request=handoff_pb2.SlotRequest(transfer_id=transfer, part=part, bytes=64))

    @rule(peer=PEERS, transfer=TRANSFERS, parts=st.sampled_from([LAYERS, LAYERS, LAYERS, 1]))
    def finish(self, peer: str, transfer: bytes, parts: int) -> None:
        prompt = prompt_of(transfer)
        token = common_pb2.Token(position=len(prompt), token_id=continuation(prompt, 1)[0])
        flows = [handoff_pb2.FlowParts(parts=parts)]
        self.say(peer, finish=handoff_pb2.Finish(transfer_id=transfer, first_tokens=[token], flows=flows))

    @rule(peer=PEERS, transfer=TRANSFERS)
    def give_up(self, peer: str, transfer: bytes) -> None:
        self.say(peer, abort=handoff_pb2.AbortHandoff(transfer_id=transfer, reason="no more"))

    @rule(peer=PEERS, transfer=TRANSFERS)
    def drained(self, peer: str, transfer: bytes) -> None:
        """Its writes have ended: from here on none of them lands."""
        if peer not in self.streams or not self.streams[peer].open:
            return
        owners = {claim.peer for claim in self.claims(transfer)}
        if owners <= {self.streams[peer].name}:
            self.no_more_writes(lambda one: one == transfer)
            self.say(peer, drained=handoff_pb2.Drained(transfer_id=transfer))

    @rule(peer=PEERS)
    def hang_up(self, peer: str) -> None:
        if peer in self.streams:
            self.streams.pop(peer).queue.put_nowait(None)
            self.settle()

    @rule(peer=PEERS)
    def process_exits(self, peer: str) -> None:
        name = f"{peer}@{self.lives[peer]:x}"
        self.hang_up(peer)
        mine = {claim.transfer_id for claim in self.claims() if claim.peer == name}
        self.no_more_writes(lambda one: one in mine)
        self.lives[peer] += 1

        async def go() -> None:
            self.world.start(self.world.receiver.process_exited(name))

        self.run(go())
        self.settle()

    def claims(self, transfer: bytes | None = None) -> list[Any]:
        slots = [slot for ring in self.world.receiver.rings for slot in ring.slots if slot.claim is not None]
        return [slot.claim for slot in slots if transfer in (None, slot.claim.transfer_id)]

    def no_more_writes(self, of: Any) -> None:
        writers = self.world.rank.writers
        for slot in [slot for slot, transfer in writers.items() if of(transfer)]:
            del writers[slot]

    # --- the rank ----------------------------------------------------------------------------------------

    @rule(data=st.data(), error=st.sampled_from(["", "", "", "digest"]))
    def lands(self, data: st.DataObject, error: str) -> None:
        """The newest grants mostly; also old ones again, and late."""
        expected = self.world.rank.expected
        if not expected:
            return
        self.part_lands(expected[-1 - data.draw(st.integers(0, min(len(expected) - 1, 6)))], error)

    def part_lands(self, grant: m.Expect, error: str) -> None:
        ring = self.world.receiver.rings[0]
        slot = ring.slot(grant.slot, grant.generation)
        if self.world.rank.scatters.get(grant.slot) is grant:
            del self.world.rank.scatters[grant.slot]
        if slot is not None and self.world.rank.writers.get(grant.slot) == grant.transfer_id:
            del self.world.rank.writers[grant.slot]
            if slot.machine.state is SlotState.GRANTED and not error:
                self.landed.setdefault(grant.transfer_id, set()).add(grant.part)
        landed = m.PartLanded(
            rank=0,
            slot=grant.slot,
            generation=grant.generation,
            transfer_id=grant.transfer_id,
            source_rank=0,
            part=grant.part,
            layers=(grant.part, grant.part + 1),
            tokens=(0, len(prompt_of(grant.transfer_id))),
            bytes=64,
            error=error,
        )
        self.world.rank.on_event(m.PartsLanded((landed,)))
        self.settle()

    @rule(data=st.data())
    def rank_answers(self, data: st.DataObject) -> None:
        waiting = self.world.rank.unanswered
        if waiting:
            self.world.rank.answer(data.draw(st.integers(0, len(waiting) - 1)))
            self.settle()

    @rule(
        peer=PEERS,
        transfer=TRANSFERS,
        lands=st.sampled_from([0, 1, LAYERS, LAYERS]),
        said=st.sampled_from([0, 1, LAYERS, LAYERS]),
        meanwhile=st.lists(st.sampled_from(["evicted", "asked", "cancelled"]), max_size=2),
        steps=st.integers(0, NEW),
    )
    def hands_over(
        self, peer: str, transfer: bytes, lands: int, said: int, meanwhile: list[str], steps: int
    ) -> None:
        """Up to a point: so many parts land, so many are named at the end. By chance alone few would get so far.
        What happens `meanwhile` comes between a commit and the engine's turn to carry it out; so many steps follow
        before the answer is heard."""
        self.connect(peer, stale=False)
        self.reserve(peer, transfer)
        for part in range(LAYERS):
            self.want(peer, transfer, part)
            grants = [one for one in self.world.rank.expected if one.transfer_id == transfer]
            if part < lands and grants and grants[-1].part == part:
                self.part_lands(grants[-1], "")
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

    # --- routers, and the worker itself ------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        async def go() -> None:
            self.world.start(coroutine)

        self.run(go())
        self.settle()

    @rule(transfer=TRANSFERS, stale=st.booleans())
    def attach(self, transfer: bytes, stale: bool) -> None:
        request = decode_pb2.AttachRequest(
            transfer_id=transfer, worker_epoch=99 if stale else self.world.core.epoch
        )

        async def go() -> None:
            known = self.world.role.attempts.get(transfer) is not None
            with contextlib.suppress(BatonError):
                self.world.role.attach(request)
                assert known or not self.world.core.draining, "a leaving worker took something new"

        self.run(go())

    @rule(transfer=TRANSFERS)
    def ask_arbiter(self, transfer: bytes) -> None:
        self.begin(self.ask(transfer))

    async def ask(self, transfer: bytes) -> None:
        before = transfer in self.committed
        if await self.world.role.abort(transfer) is HandoffState.ABORTED:
            self.promised_dead.add(transfer)
            assert before or transfer not in self.committed, "ABORTED, and the engine has it"
        else:
            assert transfer in self.committed, "COMMITTED, and the engine has not heard of it"

    @rule(transfer=TRANSFERS)
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
        before = {one: one.machine.state for one in role.attempts.all()}
        self.begin(role.give_back_running() if all_of_it else role.give_back_waiting())
        for attempt, state in before.items():
            if state is DecodeState.ENDED:
                continue
            if not all_of_it and state is not DecodeState.EXPECTED:
                assert attempt.machine.state is state, "more was given back than what has not begun"
            elif all_of_it and state is DecodeState.DECODING and attempt.log.ended:
                assert attempt.log._end is not None
                end, tokens = attempt.log._end, [token.token_id for token in attempt.log.tokens]
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
        world = self.world
        world.core.engine.check_integrity()
        world.receiver.check_integrity()
        for ring in world.receiver.rings:
            for slot in ring.slots:
                if slot.machine.state is SlotState.FREE:
                    assert slot.index not in world.rank.writers, "a slot is free that may be written into"
        for part in world.rank.scatters.values():
            families = world.core.engine._requests
            owner = families[part.transfer_id.hex()][0].blocks if part.transfer_id.hex() in families else []
            assert owner[: len(part.block_ids)] == list(part.block_ids), (
                "a part may be scattered into blocks that are not its request's any more"
            )
        live = {attempt.engine_id for attempt in world.role.attempts.all()}
        assert set(world.role.by_engine_id) <= live

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
        for transfer in [bytes([i]) * 16 for i in range(1, 4)]:
            self.ask_arbiter(transfer)
            self.cancel(transfer)
        self.answer_all()
        assert self.world.receiver.live == 0
        assert self.world.core.engine.stats().blocks_held == 0, "blocks are held that nobody owns"
        for peer in ("p0", "p1"):
            self.process_exits(peer)
        self.answer_all()
        stuck = [task for task in self.world.tasks if not task.done()]
        assert not stuck, stuck
        for task in self.world.tasks:
            task.result()
        (ring,) = self.world.receiver.rings
        assert ring.count(SlotState.FREE) == len(ring.slots), "a slot that nobody writes into is not free"
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


DecodeMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDecodeWorker = DecodeMachine.TestCase
