"""The ring's integrity under any order of events, duplicates and stale generations included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cluster.errors import IllegalTransition
from kv_transfer.decode_side.ring import IncomingPart, Ring, Slot, SlotState, _Shares
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
        self.grants: list[tuple[IncomingPart, int, int]] = []
        self.waiting: list[IncomingPart] = []
        self.writers: dict[int, bytes] = {}  # slot → transfer whose late write may still land in it
        self.ring = Ring(list(range(8)), self.granted)

    def granted(self, part: IncomingPart, slot: Slot) -> None:
        assert slot.index not in self.writers, "a slot in doubt was granted again"
        before_it = [
            one for one in self.waiting if (one.transfer_id, one.peer) == (part.transfer_id, part.peer)
        ]
        assert before_it[0] is part, "a hand-off's parts are out of order"
        self.waiting.remove(part)
        self.writers[slot.index] = part.transfer_id
        self.grants.append((part, slot.index, slot.generation))
        REACHED.hit("granted")

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        peer=st.sampled_from(PEERS),
        part=st.integers(0, 5),
        count=st.integers(1, 4),
    )
    def ask(self, transfer, peer, part, count):
        for number in range(part, part + count):
            part = IncomingPart(transfer, peer, 0, number, 10)
            self.waiting.append(part)
            self.ring.ask(part)

    @rule(data=st.data())
    def land(self, data):
        if not self.grants:
            return
        part, index, generation = data.draw(st.sampled_from(self.grants))
        slot = self.ring.slot(index, generation)
        if slot is None or slot.machine.state is not SlotState.GRANTED:
            REACHED.hit("late")
            return  # late or repeated: dropped by the ring's caller
        assert slot.part == part
        # The ring grants the slot again from inside the call.
        del self.writers[index]
        self.ring.scattered(slot)
        REACHED.hit("landed")

    @rule(transfer=st.sampled_from(TRANSFERS))
    def end(self, transfer):
        self.waiting = [part for part in self.waiting if part.transfer_id != transfer]
        if self.ring.quarantine(transfer):
            REACHED.hit("in doubt")

    @rule(transfer=st.sampled_from(TRANSFERS))
    def drained(self, transfer):
        doubtful = self._quarantined(lambda part: part.transfer_id == transfer)
        for index in doubtful:
            del self.writers[index]
            REACHED.hit("drained")
        self.ring.fence_proven(lambda part: part.transfer_id == transfer)

    @rule(peer=st.sampled_from(PEERS))
    def exited(self, peer):
        for index in self._quarantined(lambda part: part.peer == peer):
            del self.writers[index]
            REACHED.hit("exited")
        self.ring.fence_proven(lambda part: part.peer == peer)

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
            if slot.machine.state is SlotState.QUARANTINED and slot.part is not None and mine(slot.part)
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
        held = [slot.part for slot in self.ring.slots if slot.part is not None]
        slots = len(self.ring.slots)
        peers = Counter(part.peer for part in held)
        transfers = Counter(part.transfer_id for part in held)
        assert max(peers.values(), default=0) <= slots // 2
        assert max(transfers.values(), default=0) <= slots // 4
        for part in self.waiting:
            if peers[part.peer] >= slots // 2:
                REACHED.hit("half")
            elif transfers[part.transfer_id] >= slots // 4:
                REACHED.hit("quarter")
            else:
                assert not self.ring.count(SlotState.FREE), f"{part} waits beside a free slot"


def test_the_ring_keeps_its_accounts():
    how = settings(max_examples=80, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(RingMachine, settings=how)
    REACHED.check()


def test_shares_are_bounded_per_transfer_and_peer():
    grants: list[IncomingPart] = []
    ring = Ring(list(range(16)), lambda part, slot: grants.append(part))
    for part in range(10):
        ring.ask(IncomingPart(TRANSFERS[0], "p1", 0, part, 1))
    assert len(grants) == 4
    for transfer in TRANSFERS[1:]:
        for part in range(10):
            ring.ask(IncomingPart(transfer, "p1", 0, part, 1))
    assert len(grants) == 8
    ring.ask(IncomingPart(b"x" * 16, "p2", 0, 0, 1))
    assert len(grants) == 9


def test_a_transfer_in_doubt_costs_its_own_slots_and_no_more():
    """Its peer's other hand-offs go on within the peer's half, in which slots in doubt count."""
    grants: list[IncomingPart] = []
    ring = Ring(list(range(8)), lambda part, slot: grants.append(part))
    for part in range(4):
        ring.ask(IncomingPart(TRANSFERS[0], "p1", 0, part, 1))
    ring.quarantine(TRANSFERS[0])
    assert len(grants) == 2 and ring.count(SlotState.QUARANTINED) == 2
    for transfer in TRANSFERS[1:]:
        for part in range(4):
            ring.ask(IncomingPart(transfer, "p1", 0, part, 1))
    assert len(grants) == 4, "the half of the ring that is left to the peer"
    assert {part.transfer_id for part in grants[2:]} <= set(TRANSFERS[1:])
    ring.fence_proven(lambda part: part.transfer_id == TRANSFERS[0])
    assert len(grants) == 6
    ring.check_integrity()


def test_slots_in_doubt_are_never_granted():
    grants: list[int] = []
    ring = Ring(list(range(4)), lambda part, slot: grants.append(slot.index))
    for number, transfer in enumerate(TRANSFERS):
        ring.ask(IncomingPart(transfer, f"p{number}", 0, 0, 1))
        ring.quarantine(transfer)
    ring.ask(IncomingPart(b"x" * 16, "q", 0, 0, 1))
    assert sorted(grants) == [0, 1, 2, 3]
    ring.fence_proven(lambda part: part.peer == "p2")
    assert grants[4:] == grants[2:3]


def hold_back(slots: int) -> tuple[Ring, list[Slot], list[IncomingPart]]:
    """A ring whose slots are all held by a peer that asks for nothing more."""
    granted: list[Slot] = []
    parts: list[IncomingPart] = []

    def grant(part: IncomingPart, slot: Slot) -> None:
        granted.append(slot)
        parts.append(part)

    ring = Ring(list(range(slots)), grant)
    for number in range(slots):
        ring.ask(IncomingPart(b"held" + bytes(11) + bytes([number]), f"holder {number % 4}", 0, 0, 1))
    assert len(granted) == slots
    held = list(granted)
    parts.clear()
    return ring, held, parts


def test_a_newcomer_does_not_wait_for_all_that_others_asked_before():
    ring, held, parts = hold_back(16)
    for long_one in range(12):
        for part in range(32):
            ring.ask(IncomingPart(b"long" + bytes(11) + bytes([long_one]), "p1", 0, part, 1))
    newcomer = IncomingPart(b"n" * 16, "p1", 0, 0, 1)
    ring.ask(newcomer)
    while newcomer not in parts:
        ring.scattered(held.pop() if held else ring.slots[len(parts) % 16])
        assert len(parts) <= 13, "it waits for more than one turn of each"
    numbers = [part.number for part in parts if part.transfer_id == parts[0].transfer_id]
    assert numbers == sorted(numbers), "a hand-off's parts are out of order"


def test_peers_take_turns():
    """For any number of hand-offs of each of them."""
    ring, held, parts = hold_back(16)
    for number in range(40):
        ring.ask(IncomingPart(b"many" + bytes(11) + bytes([number]), "p1", 0, 0, 1))
    for part in range(3):
        ring.ask(IncomingPart(b"f" * 16, "p2", 0, part, 1))
    for _ in range(6):
        ring.scattered(held.pop())
    assert [part.peer for part in parts] == ["p1", "p2"] * 3


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
        ring.ask(IncomingPart(transfer_id, f"p{number % handoffs % 2}", 0, number, 1))
    asked = 0
    for _ in range(24):
        ring.scattered(held.pop())
    assert asked <= 24 * 8, f"{asked} questions for 24 releases"
    before, asked = ring.waiting, 0
    ring.quarantine(b"w" * 12 + (handoffs - 1).to_bytes(4))
    assert ring.waiting < before and asked <= 8
    ring.check_integrity()


def test_an_illegal_step_raises():
    ring = Ring([0], lambda part, slot: None)
    with pytest.raises(IllegalTransition):
        ring.slots[0].machine.to(SlotState.VERIFIED)
