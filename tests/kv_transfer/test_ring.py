"""The ring's integrity under any order of events, duplicates and stale generations included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cluster.errors import IllegalTransition
from kv_transfer.decode_side.ring import Claim, Ring, Slot, SlotState, _Shares
from tests.harness.reached import Reached

TRANSFERS = [bytes([i]) * 16 for i in range(4)]
PEERS = ["p1", "p2"]


REACHED = Reached(
    ["granted", "landed", "late", "in doubt", "drained", "exited", "fenced", "grown", "half", "quarter"]
)


class RingMachine(RuleBasedStateMachine):
    """Events in any order. A slot handed out must never be handed out again before its fence is proven."""

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[tuple[Claim, int, int]] = []
        self.waiting: list[Claim] = []
        self.writers: dict[int, bytes] = {}  # slot → transfer whose late write may still land in it
        self.ring = Ring(list(range(8)), self.granted)

    def granted(self, claim: Claim, slot: Slot) -> None:
        assert slot.index not in self.writers, "a slot in doubt was granted again"
        before_it = [
            one for one in self.waiting if (one.transfer_id, one.peer) == (claim.transfer_id, claim.peer)
        ]
        assert before_it[0] is claim, "a hand-off's parts are out of order"
        self.waiting.remove(claim)
        self.writers[slot.index] = claim.transfer_id
        self.grants.append((claim, slot.index, slot.generation))
        REACHED.hit("granted")

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        peer=st.sampled_from(PEERS),
        part=st.integers(0, 5),
        count=st.integers(1, 4),
    )
    def ask(self, transfer, peer, part, count):
        for number in range(part, part + count):
            claim = Claim(transfer, peer, 0, number, 10)
            self.waiting.append(claim)
            self.ring.ask(claim)

    @rule(data=st.data())
    def land(self, data):
        if not self.grants:
            return
        claim, index, generation = data.draw(st.sampled_from(self.grants))
        slot = self.ring.slot(index, generation)
        if slot is None or slot.machine.state is not SlotState.GRANTED:
            REACHED.hit("late")
            return  # late or repeated: dropped by the ring's caller
        assert slot.claim == claim
        # The ring grants the slot again from inside the call.
        del self.writers[index]
        self.ring.scattered(slot)
        REACHED.hit("landed")

    @rule(transfer=st.sampled_from(TRANSFERS))
    def end(self, transfer):
        self.waiting = [claim for claim in self.waiting if claim.transfer_id != transfer]
        if self.ring.quarantine(transfer):
            REACHED.hit("in doubt")

    @rule(transfer=st.sampled_from(TRANSFERS))
    def drained(self, transfer):
        doubtful = self._quarantined(lambda claim: claim.transfer_id == transfer)
        for index in doubtful:
            del self.writers[index]
            REACHED.hit("drained")
        self.ring.fence_proven(lambda claim: claim.transfer_id == transfer)

    @rule(peer=st.sampled_from(PEERS))
    def exited(self, peer):
        for index in self._quarantined(lambda claim: claim.peer == peer):
            del self.writers[index]
            REACHED.hit("exited")
        self.ring.fence_proven(lambda claim: claim.peer == peer)

    @rule()
    def fence(self):
        self.waiting.clear()
        self.ring.fence_all()
        REACHED.hit("fenced")

    @rule()
    def grow(self):
        if len(self.ring.slots) < 16:
            self.ring.add_segment([100 + len(self.ring.slots)])
            REACHED.hit("grown")

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
        assert self.ring.waiting == len(self.waiting)

    @invariant()
    def shares(self):
        """No peer or hand-off exceeds its share, and none below its share waits while a slot is free."""
        held = [slot.claim for slot in self.ring.slots if slot.claim is not None]
        slots = len(self.ring.slots)
        peers = Counter(claim.peer for claim in held)
        transfers = Counter(claim.transfer_id for claim in held)
        assert max(peers.values(), default=0) <= slots // 2
        assert max(transfers.values(), default=0) <= slots // 4
        for claim in self.waiting:
            if peers[claim.peer] >= slots // 2:
                REACHED.hit("half")
            elif transfers[claim.transfer_id] >= slots // 4:
                REACHED.hit("quarter")
            else:
                assert not self.ring.count(SlotState.FREE), f"{claim} waits beside a free slot"


def test_the_ring_keeps_its_accounts():
    how = settings(max_examples=80, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(RingMachine, settings=how)
    REACHED.check()


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


def test_a_transfer_in_doubt_costs_its_own_slots_and_no_more():
    """Its peer's other hand-offs go on within the peer's half, in which slots in doubt count."""
    grants: list[Claim] = []
    ring = Ring(list(range(8)), lambda claim, slot: grants.append(claim))
    for part in range(4):
        ring.ask(Claim(TRANSFERS[0], "p1", 0, part, 1))
    ring.quarantine(TRANSFERS[0])
    assert len(grants) == 2 and ring.count(SlotState.QUARANTINED) == 2
    for transfer in TRANSFERS[1:]:
        for part in range(4):
            ring.ask(Claim(transfer, "p1", 0, part, 1))
    assert len(grants) == 4, "the half of the ring that is left to the peer"
    assert {claim.transfer_id for claim in grants[2:]} <= set(TRANSFERS[1:])
    ring.fence_proven(lambda claim: claim.transfer_id == TRANSFERS[0])
    assert len(grants) == 6
    ring.check_integrity()


def test_slots_in_doubt_are_never_granted():
    grants: list[int] = []
    ring = Ring(list(range(4)), lambda claim, slot: grants.append(slot.index))
    for number, transfer in enumerate(TRANSFERS):
        ring.ask(Claim(transfer, f"p{number}", 0, 0, 1))
        ring.quarantine(transfer)
    ring.ask(Claim(b"x" * 16, "q", 0, 0, 1))
    assert sorted(grants) == [0, 1, 2, 3]
    ring.fence_proven(lambda claim: claim.peer == "p2")
    assert grants[4:] == grants[2:3]


def hold_back(slots: int) -> tuple[Ring, list[Slot], list[Claim]]:
    """A ring whose slots are all held by a peer that asks for nothing more."""
    granted: list[Slot] = []
    claims: list[Claim] = []

    def grant(claim: Claim, slot: Slot) -> None:
        granted.append(slot)
        claims.append(claim)

    ring = Ring(list(range(slots)), grant)
    for number in range(slots):
        ring.ask(Claim(b"held" + bytes(11) + bytes([number]), f"holder {number % 4}", 0, 0, 1))
    assert len(granted) == slots
    held = list(granted)
    claims.clear()
    return ring, held, claims


def test_a_newcomer_does_not_wait_for_all_that_others_asked_before():
    ring, held, claims = hold_back(16)
    for long_one in range(12):
        for part in range(32):
            ring.ask(Claim(b"long" + bytes(11) + bytes([long_one]), "p1", 0, part, 1))
    newcomer = Claim(b"n" * 16, "p1", 0, 0, 1)
    ring.ask(newcomer)
    while newcomer not in claims:
        ring.scattered(held.pop() if held else ring.slots[len(claims) % 16])
        assert len(claims) <= 13, "it waits for more than one turn of each"
    parts = [claim.part for claim in claims if claim.transfer_id == claims[0].transfer_id]
    assert parts == sorted(parts), "a hand-off's parts are out of order"


def test_peers_take_turns():
    """For any number of hand-offs of each of them."""
    ring, held, claims = hold_back(16)
    for number in range(40):
        ring.ask(Claim(b"many" + bytes(11) + bytes([number]), "p1", 0, 0, 1))
    for part in range(3):
        ring.ask(Claim(b"f" * 16, "p2", 0, part, 1))
    for _ in range(6):
        ring.scattered(held.pop())
    assert [claim.peer for claim in claims] == ["p1", "p2"] * 3


@pytest.mark.parametrize("handoffs", [1, 8, 8000])
def test_the_cost_of_a_release_does_not_grow_with_waiting_claims(handoffs, monkeypatch):
    asked = 0

    def counted(may: Callable[..., bool]) -> Callable[..., bool]:
        def count(*arguments: object) -> bool:
            nonlocal asked
            asked += 1
            return may(*arguments)

        return count

    monkeypatch.setattr(_Shares, "peer_may", counted(_Shares.peer_may))
    monkeypatch.setattr(_Shares, "handoff_may", counted(_Shares.handoff_may))
    ring, held, _ = hold_back(32)
    for number in range(8000):
        transfer_id = b"w" * 12 + (number % handoffs).to_bytes(4)
        ring.ask(Claim(transfer_id, f"p{number % handoffs % 2}", 0, number, 1))
    asked = 0
    for _ in range(24):
        ring.scattered(held.pop())
    assert asked <= 24 * 8, f"{asked} questions for 24 releases"
    before, asked = ring.waiting, 0
    ring.quarantine(b"w" * 12 + (handoffs - 1).to_bytes(4))
    assert ring.waiting < before and asked <= 8
    ring.check_integrity()


def test_an_illegal_step_raises():
    ring = Ring([0], lambda claim, slot: None)
    with pytest.raises(IllegalTransition):
        ring.slots[0].machine.to(SlotState.VERIFIED)
