"""The ring's accounts under any order of events, duplicates and stale generations included."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.errors import IllegalTransition
from kv_transfer.ring import Ring, Slot, SlotState
from kv_transfer.turns import Claim

TRANSFERS = [bytes([i]) * 16 for i in range(4)]
PEERS = ["p1", "p2"]


class RingMachine(RuleBasedStateMachine):
    """Events in any order. A slot handed out must never be handed out again before its fence is proven."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[tuple[Claim, int, int]] = []
        self.writers: dict[int, bytes] = {}  # slot → transfer whose late write may still land in it
        self.ring = Ring(list(range(8)), self.granted)

    def granted(self, claim: Claim, slot: Slot) -> None:
        assert slot.index not in self.writers, "a slot in doubt was granted again"
        self.writers[slot.index] = claim.transfer_id
        self.grants.append((claim, slot.index, slot.generation))

    @rule(transfer=st.sampled_from(TRANSFERS), peer=st.sampled_from(PEERS), part=st.integers(0, 5))
    def ask(self, transfer, peer, part):
        self.ring.ask(Claim(transfer, peer, 0, part, 10))

    @rule(data=st.data())
    def land(self, data):
        if not self.grants:
            return
        claim, index, generation = data.draw(st.sampled_from(self.grants))
        slot = self.ring.slot(index, generation)
        if slot is None or slot.machine.state is not SlotState.GRANTED:
            return  # late or repeated: dropped by whoever asks the ring
        assert slot.claim == claim
        # The ring grants the slot again from inside the call.
        del self.writers[index]
        self.ring.scattered(slot)

    @rule(transfer=st.sampled_from(TRANSFERS))
    def end(self, transfer):
        self.ring.quarantine(transfer)

    @rule(transfer=st.sampled_from(TRANSFERS))
    def drained(self, transfer):
        doubtful = self._quarantined(lambda claim: claim.transfer_id == transfer)
        for index in doubtful:
            del self.writers[index]
        self.ring.fence_proven(lambda claim: claim.transfer_id == transfer)

    @rule(peer=st.sampled_from(PEERS))
    def exited(self, peer):
        for index in self._quarantined(lambda claim: claim.peer == peer):
            del self.writers[index]
        self.ring.fence_proven(lambda claim: claim.peer == peer)

    @rule()
    def fence(self):
        self.ring.fence_all()

    @rule()
    def grow(self):
        if len(self.ring.slots) < 16:
            self.ring.add_segment([100 + len(self.ring.slots)])

    def _quarantined(self, mine):
        return [
            slot.index
            for slot in self.ring.slots
            if slot.machine.state is SlotState.QUARANTINED and slot.claim is not None and mine(slot.claim)
        ]

    @invariant()
    def whole(self):
        self.ring.check_integrity()
        assert set(self.writers) == {
            s.index for s in self.ring.slots if s.machine.state is not SlotState.FREE
        }


RingMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRing = RingMachine.TestCase


def test_shares_are_bounded_per_transfer_and_peer():
    grants: list[Claim] = []
    ring = Ring(list(range(16)), lambda claim, slot: grants.append(claim))
    for part in range(10):
        ring.ask(Claim(TRANSFERS[0], "p1", 0, part, 1))
    assert len(grants) == 4
    for transfer in TRANSFERS[1:]:
        for part in range(10):
            ring.ask(Claim(transfer, "p1", 0, part, 1))
    assert len(grants) == 8
    ring.ask(Claim(b"x" * 16, "p2", 0, 0, 1))
    assert len(grants) == 9


def test_a_peer_in_quarantine_gets_nothing_new():
    grants: list[Claim] = []
    ring = Ring(list(range(8)), lambda claim, slot: grants.append(claim))
    ring.ask(Claim(TRANSFERS[0], "p1", 0, 0, 1))
    ring.quarantine(TRANSFERS[0])
    ring.ask(Claim(TRANSFERS[1], "p1", 0, 0, 1))
    assert len(grants) == 1
    ring.fence_proven(lambda claim: claim.transfer_id == TRANSFERS[0])
    assert len(grants) == 2


def test_an_illegal_step_raises():
    ring = Ring([0], lambda claim, slot: None)
    with pytest.raises(IllegalTransition):
        ring.slots[0].machine.to(SlotState.VERIFIED)
