"""The rules of prefill workers and of the rank in the decode worker's state machine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from cluster.errors import StaleEpochError
from kv_transfer import messages as m
from kv_transfer.decode_side.ring import SlotState
from tests.decode_worker.decode_story import REACHED, TRANSFERS, Landed, note_replies, prompt_of, spec_of
from tests.decode_worker.decode_world import LAYERS, DecodeWorld, Stream
from tests.engine.fake_model import continuation
from wire import common_pb2, handoff_pb2

ANY = st.sampled_from(TRANSFERS)
PEERS = st.sampled_from(["p0", "p1"])


class PeerRules(RuleBasedStateMachine):
    world: DecodeWorld

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.streams: dict[str, Stream] = {}
        self.lives = {"p0": 1, "p1": 1}  # epochs of the peers
        self.landed = Landed()
        self.noted: dict[str, int] = {}  # replies of each peer's present stream

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
        self.noted[peer] = 0
        self.settle()
        stream = self.streams[peer]
        assert stream.open is not stale, "a refused stream is open" if stale else stream.failure
        if stale:
            assert isinstance(stream.failure, StaleEpochError)
            assert stream.replies[-1].welcome.refused.code == "StaleEpochError"
            note_replies(stream, 0)

    def say(self, peer: str, **message: Any) -> None:
        if peer in self.streams and self.streams[peer].open:
            self.streams[peer].say(**message)
            self.settle()

    def note(self) -> None:
        for peer, stream in self.streams.items():
            note_replies(stream, self.noted[peer])
            self.noted[peer] = len(stream.replies)

    @rule(peer=PEERS, transfer=ANY)
    def reserve(self, peer: str, transfer: bytes) -> None:
        prompt = prompt_of(transfer)
        reserve = handoff_pb2.Reserve(
            transfer_id=transfer,
            request_id="r",
            spec=spec_of(transfer),
            token_count=len(prompt),
            handle=self.world.router.handle(),
        )
        self.say(peer, reserve=reserve)

    @rule(peer=PEERS, transfer=ANY, part=st.integers(0, LAYERS - 1))
    def want(self, peer: str, transfer: bytes, part: int) -> None:
        handoff = self.world.receiver._live.get(transfer)
        owner = None if handoff is None else handoff.link
        before = len(self.world.rank.expected)
        self.say(peer, slot_request=handoff_pb2.SlotRequest(transfer_id=transfer, part=part, bytes=64))
        if owner is not None and peer in self.streams and owner.name != self.streams[peer].name:
            REACHED.hit("part of another peer")
            granted = self.world.rank.expected[before:]
            assert all(one.transfer_id != transfer for one in granted), "another peer's hand-off"

    @rule(peer=PEERS)
    def reserves_all(self, peer: str) -> None:
        """Reserve more blocks than there are; the other peer asks for slots of these hand-offs, which are not its own."""
        self.connect(peer, stale=False)
        for transfer in TRANSFERS:
            self.reserve(peer, transfer)
        other = "p1" if peer == "p0" else "p0"
        self.connect(other, stale=False)
        for transfer in TRANSFERS:
            self.want(other, transfer, 0)

    def of_a_live_one(self, data: st.DataObject) -> tuple[str, bytes] | None:
        """Draw a peer with an open stream and one of its hand-offs."""
        receiver = self.world.receiver
        live = sorted(
            (one.link.name, transfer) for transfer, one in receiver._live.items() if not one.committing
        )
        if not live:
            return None
        name, transfer = data.draw(st.sampled_from(live))
        return name.split("@")[0], transfer

    @rule(data=st.data())
    def wants_too_many(self, data: st.DataObject) -> None:
        if (one := self.of_a_live_one(data)) is not None:
            self.want(*one, 100_000)

    @rule(data=st.data(), times=st.sampled_from([1, 2, 2]))
    def corrupts(self, data: st.DataObject, times: int) -> None:
        """Corrupt the part granted last, and with `times` = 2 its resend too."""
        if (one := self.of_a_live_one(data)) is None:
            return
        peer, transfer = one
        self.want(peer, transfer, 0)
        for _ in range(times):
            grants = [grant for grant in self.world.rank.expected if grant.transfer_id == transfer]
            if grants:
                self.part_lands(grants[-1], "digest")
                self.want(peer, transfer, grants[-1].part)

    @rule(peer=PEERS, transfer=ANY, said=st.sampled_from(["true", "fewer", "more", "twice", "no flow"]))
    def finish(self, peer: str, transfer: bytes, said: str) -> None:
        prompt = prompt_of(transfer)
        token = common_pb2.Token(position=len(prompt), token_id=continuation(prompt, 1)[0])
        parts = LAYERS if self.landed.held(transfer) < len(prompt) else 0
        one = handoff_pb2.FlowParts(parts=parts)
        flows = {
            "true": [one],
            "fewer": [handoff_pb2.FlowParts(parts=max(0, parts - 1))],
            "more": [handoff_pb2.FlowParts(parts=parts + 1)],
            "twice": [one, one],
            "no flow": [one, handoff_pb2.FlowParts(source_rank=1)],
        }[said]
        self.say(peer, finish=handoff_pb2.Finish(transfer_id=transfer, first_tokens=[token], flows=flows))

    @rule(peer=PEERS, transfer=ANY)
    def give_up(self, peer: str, transfer: bytes) -> None:
        self.say(peer, abort=handoff_pb2.AbortHandoff(transfer_id=transfer, reason="no more"))

    @rule(peer=PEERS, transfer=ANY)
    def drained(self, peer: str, transfer: bytes) -> None:
        """Send Drained: none of the transfer's writes lands from here on."""
        if peer not in self.streams or not self.streams[peer].open:
            return
        owners = {part.peer for part in self.parts(transfer)}
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
        mine = {part.transfer_id for part in self.parts() if part.peer == name}
        self.no_more_writes(lambda one: one in mine)
        self.lives[peer] += 1

        async def go() -> None:
            self.world.start(self.world.receiver.process_exited(name))

        self.run(go())
        self.settle()

    def parts(self, transfer: bytes | None = None) -> list[Any]:
        parts = [slot.part for ring in self.world.receiver.rings for slot in ring.slots]
        return [one for one in parts if one is not None and transfer in (None, one.transfer_id)]

    def no_more_writes(self, of: Any) -> None:
        writers = self.world.rank.writers
        for slot in [slot for slot, transfer in writers.items() if of(transfer)]:
            del writers[slot]

    # --- the rank ----------------------------------------------------------------------------------------

    @rule(data=st.data(), error=st.sampled_from(["", "", "", "digest"]), short=st.booleans())
    def lands(self, data: st.DataObject, error: str, short: bool) -> None:
        """Land a part: mostly of the newest grants, sometimes an old one again or late. A short one lacks a token."""
        expected = self.world.rank.expected
        if not expected:
            return
        newest = data.draw(st.integers(0, min(len(expected) - 1, 6)))
        self.part_lands(expected[-1 - newest], error, short)

    def part_lands(self, grant: handoff_pb2.SlotGrant, error: str, short: bool = False) -> None:
        ring = self.world.receiver.rings[0]
        slot = ring.slot(grant.slot, grant.generation)
        begin, end = self.landed.held(grant.transfer_id), len(prompt_of(grant.transfer_id))
        tokens = (begin, max(begin, end - short))
        if self.world.rank.scatters.get(grant.slot) is grant:
            del self.world.rank.scatters[grant.slot]
        if slot is not None and self.world.rank.writers.get(grant.slot) == grant.transfer_id:
            del self.world.rank.writers[grant.slot]
            if slot.machine.state is SlotState.GRANTED and not error:
                self.landed.add(grant.transfer_id, grant.part, tokens)
                if short:
                    REACHED.hit("half a part")
        elif slot is None:
            REACHED.hit("part late")
        landed = m.PartLanded(
            rank=0,
            slot=grant.slot,
            generation=grant.generation,
            transfer_id=grant.transfer_id,
            source_rank=0,
            part=grant.part,
            layers=(grant.part, grant.part + 1),
            tokens=tokens,
            bytes=64,
            error=error,
        )
        counts = self.world.receiver.stats.counts
        before = counts["stale"], counts["parts"]
        self.world.rank.on_event(m.PartsLanded((landed,)))
        self.settle()
        if slot is None:
            assert (counts["stale"], counts["parts"]) == (before[0] + 1, before[1]), "a late part counted"

    @rule(data=st.data())
    def rank_answers(self, data: st.DataObject) -> None:
        waiting = self.world.rank.unanswered
        if waiting:
            self.world.rank.answer(data.draw(st.integers(0, len(waiting) - 1)))
            self.settle()
