"""The landing ring's accounts: who may write into which slot, and when it may be used again.

    FREE ──grant──► GRANTED ──► LANDED ──► VERIFIED ──► FREE
                       └───────────┴──────────┴──► QUARANTINED ──fence proven──► FREE

A slot in doubt is never reused on a guess: a late write may still land in it. Only two proofs end a quarantine:
the sender says that every handle of the transfer is terminal, or its parent says that its process has exited.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from cluster.state_machine import StateMachine

MAX_WAITING = 16384  # claims


class SlotState(Enum):
    FREE = "free"
    GRANTED = "granted"
    LANDED = "landed"
    VERIFIED = "verified"
    QUARANTINED = "quarantined"


S = SlotState
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    S.FREE: frozenset({S.GRANTED}),
    S.GRANTED: frozenset({S.LANDED, S.QUARANTINED}),
    S.LANDED: frozenset({S.VERIFIED, S.QUARANTINED}),
    S.VERIFIED: frozenset({S.FREE, S.QUARANTINED}),
    S.QUARANTINED: frozenset({S.FREE}),
}


@dataclass(frozen=True)
class Claim:
    """One part that wants, or has, a slot."""

    transfer_id: bytes
    peer: str
    source_rank: int
    part: int
    bytes: int


@dataclass
class Slot:
    index: int
    address: int
    generation: int = 0
    claim: Claim | None = None
    machine: StateMachine[SlotState] = field(
        default_factory=lambda: StateMachine(S.FREE, TRANSITIONS, "slot")
    )


class _Shares:
    """Who holds how many slots: counted once, then kept while claims are served."""

    def __init__(self, slots: list[Slot]):
        held = [(slot.claim, slot.machine.state) for slot in slots if slot.claim is not None]
        self._transfers = Counter(claim.transfer_id for claim, _ in held)
        self._peers = Counter(claim.peer for claim, _ in held)
        self._doubtful = {claim.peer for claim, state in held if state is S.QUARANTINED}
        self._of_transfer = max(1, len(slots) // 4)
        self._of_peer = max(1, len(slots) // 2)

    def allow(self, claim: Claim) -> bool:
        return (
            claim.peer not in self._doubtful
            and self._transfers[claim.transfer_id] < self._of_transfer
            and self._peers[claim.peer] < self._of_peer
        )

    def add(self, claim: Claim) -> None:
        self._transfers[claim.transfer_id] += 1
        self._peers[claim.peer] += 1


class Ring:
    """Grants round robin: at most a quarter of the ring to one hand-off, half to one peer.

    `on_grant(claim, slot)` is called for each grant, in the order of asking within these limits.
    """

    def __init__(self, addresses: list[int], on_grant: Callable[[Claim, Slot], None]):
        self.slots = [Slot(index, address) for index, address in enumerate(addresses)]
        self._free: deque[int] = deque(range(len(self.slots)))
        self._waiting: deque[Claim] = deque()
        self._on_grant = on_grant

    def ask(self, claim: Claim) -> None:
        self._waiting.append(claim)
        self._grant()

    def slot(self, index: int, generation: int) -> Slot | None:
        """The slot, if this is still its generation: anything else is late."""
        if not 0 <= index < len(self.slots):
            return None
        slot = self.slots[index]
        return slot if slot.generation == generation and slot.claim is not None else None

    def scattered(self, slot: Slot) -> None:
        """The part landed, was verified and copied out."""
        for state in (S.LANDED, S.VERIFIED):
            slot.machine.to(state)
        self._release(slot)

    def landed_wrong(self, slot: Slot) -> None:
        """It landed and failed its check: its transfer is terminal (the notification came), so it is free."""
        slot.machine.to(S.LANDED)
        slot.machine.to(S.VERIFIED)
        self._release(slot)

    def quarantine(self, transfer_id: bytes) -> list[Slot]:
        """The transfer ended early: its slots are in doubt, its waiting claims are gone."""
        self._waiting = deque(claim for claim in self._waiting if claim.transfer_id != transfer_id)
        doubtful = [
            slot
            for slot in self.slots
            if slot.claim is not None
            and slot.claim.transfer_id == transfer_id
            and slot.machine.state is not S.QUARANTINED
        ]
        for slot in doubtful:
            slot.machine.to(S.QUARANTINED)
        self._grant()
        return doubtful

    def fence_all(self) -> None:
        """This worker rejoins under a new epoch: every slot that is not FREE is in doubt."""
        self._waiting.clear()
        for slot in self.slots:
            if slot.machine.state not in (S.FREE, S.QUARANTINED):
                slot.machine.to(S.QUARANTINED)

    def in_doubt(self, mine: Callable[[Claim], bool]) -> bool:
        return any(
            slot.machine.state is S.QUARANTINED and slot.claim is not None and mine(slot.claim)
            for slot in self.slots
        )

    def drained(self, transfer_id: bytes) -> None:
        """Proof: every handle of the transfer is terminal."""
        self._free_quarantined(lambda claim: claim.transfer_id == transfer_id)

    def process_exited(self, peer: str) -> None:
        """Proof: the peer's process is gone, by the word of its parent."""
        self._free_quarantined(lambda claim: claim.peer == peer)

    def add_segment(self, addresses: list[int]) -> None:
        for address in addresses:
            slot = Slot(len(self.slots), address)
            self.slots.append(slot)
            self._free.append(slot.index)
        self._grant()

    def count(self, state: SlotState) -> int:
        return sum(slot.machine.state is state for slot in self.slots)

    @property
    def crowded(self) -> bool:
        """More wait than honest senders, which ask a part or two ahead, ever make wait."""
        return len(self._waiting) >= MAX_WAITING

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _free_quarantined(self, mine: Callable[[Claim], bool]) -> None:
        for slot in self.slots:
            if slot.machine.state is S.QUARANTINED and slot.claim is not None and mine(slot.claim):
                self._release(slot)

    def _release(self, slot: Slot) -> None:
        slot.machine.to(S.FREE)
        slot.claim = None
        self._free.append(slot.index)
        self._grant()

    def _grant(self) -> None:
        """Serves waiting claims in order; one that is over its share lets the next pass."""
        if not self._waiting or not self._free:
            return
        shares = _Shares(self.slots)
        passed: deque[Claim] = deque()
        while self._waiting and self._free:
            claim = self._waiting.popleft()
            if not shares.allow(claim):
                passed.append(claim)
                continue
            slot = self.slots[self._free.popleft()]
            slot.generation += 1
            slot.claim = claim
            slot.machine.to(S.GRANTED)
            shares.add(claim)
            self._on_grant(claim, slot)
        self._waiting.extendleft(reversed(passed))

    def check_integrity(self) -> None:
        free = self.count(S.FREE)
        assert free == len(self._free) == len(set(self._free)), "the free list is not the free slots"
        assert all((slot.claim is None) == (slot.machine.state is S.FREE) for slot in self.slots)
        held = sum(self.count(state) for state in (S.GRANTED, S.LANDED, S.VERIFIED))
        assert free + held + self.count(S.QUARANTINED) == len(self.slots)
