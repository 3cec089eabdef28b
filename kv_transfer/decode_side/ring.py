"""The landing ring: which peer may write into which slot, and when a slot may be granted again.

    FREE ──grant──► GRANTED ──► LANDED ──► VERIFIED ──► FREE
                       │           ├─wrong, or never sent─► FREE
                       └───────────┴──────────┴──► QUARANTINED ──fence proven──► FREE

A late write may still land in a slot in doubt. Only two proofs end its quarantine: the sender reports that every write of
the transfer is terminal, or the sender's process is known to have exited (from its parent, or from Kubernetes).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self, TypeVar

from cluster.errors import TransportError
from cluster.state_machine import StateMachine
from wire import handoff_pb2

MAX_WAITING = 16384  # parts of one peer


@dataclass(frozen=True)
class IncomingPart:
    """One part that waits for a slot or has one."""

    transfer_id: bytes
    peer: str  # worker_id@epoch
    source_rank: int
    number: int  # of the part in its hand-off
    bytes: int


class Turns:
    """The order of waiting parts: round robin over peers, then over each peer's hand-offs, first in first out within one.

    So a hand-off that needs few slots does not wait behind all parts that arrived before it. `take` and `drop` cost
    O(peers), independent of the number of parts and hand-offs.
    """

    def __init__(self) -> None:
        # In the order of turns: the next one first.
        self._peers: OrderedDict[str, OrderedDict[bytes, deque[IncomingPart]]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def of(self, peer: str) -> int:
        return self._counts[peer]

    def add(self, part: IncomingPart) -> None:
        handoffs = self._peers.setdefault(part.peer, OrderedDict())
        handoffs.setdefault(part.transfer_id, deque()).append(part)
        self._counts[part.peer] += 1

    def take(
        self, peer_may: Callable[[str], bool], handoff_may: Callable[[bytes], bool]
    ) -> IncomingPart | None:
        """Remove and return the next part that `peer_may` and `handoff_may` allow; the others keep their turn."""
        for peer, handoffs in self._peers.items():
            if not peer_may(peer):
                continue
            for transfer_id, parts in handoffs.items():
                if handoff_may(transfer_id):
                    part = parts.popleft()
                    self._counts[peer] -= 1
                    self._end_turn(peer, handoffs, transfer_id)
                    return part
        return None

    def _end_turn(
        self, peer: str, handoffs: OrderedDict[bytes, deque[IncomingPart]], transfer_id: bytes
    ) -> None:
        self._peers.move_to_end(peer)
        handoffs.move_to_end(transfer_id)
        if not handoffs[transfer_id]:
            self._forget(peer, transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Remove all parts of a transfer."""
        for peer in [peer for peer, handoffs in self._peers.items() if transfer_id in handoffs]:
            self._counts[peer] -= len(self._peers[peer][transfer_id])
            self._forget(peer, transfer_id)

    def _forget(self, peer: str, transfer_id: bytes) -> None:
        del self._peers[peer][transfer_id]
        if not self._peers[peer]:
            del self._peers[peer], self._counts[peer]

    def clear(self) -> None:
        self._peers.clear()
        self._counts.clear()


class SlotState(Enum):
    FREE = "free"
    GRANTED = "granted"
    LANDED = "landed"
    VERIFIED = "verified"
    QUARANTINED = "quarantined"


S = SlotState
K = TypeVar("K", bound=Hashable)
TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    S.FREE: frozenset({S.GRANTED}),
    S.GRANTED: frozenset({S.LANDED, S.QUARANTINED}),
    S.LANDED: frozenset({S.VERIFIED, S.FREE, S.QUARANTINED}),
    S.VERIFIED: frozenset({S.FREE, S.QUARANTINED}),
    S.QUARANTINED: frozenset({S.FREE}),
}


@dataclass
class Slot:
    index: int
    address: int
    generation: int = 0
    part: IncomingPart | None = None
    carried: bool = False  # its part has come over the control stream
    machine: StateMachine[SlotState] = field(
        default_factory=lambda: StateMachine(S.FREE, TRANSITIONS, "slot")
    )


def worker_of(peer: str) -> str:
    """The worker_id of worker_id@epoch. A worker may release its slots in doubt under a later epoch."""
    return peer.rsplit("@", 1)[0]


class _Shares:
    """Slots per transfer and per peer, counted from the grant until the slot is free, also while it is in doubt."""

    def __init__(self) -> None:
        self._transfers: Counter[bytes] = Counter()
        self._peers: Counter[str] = Counter()

    @classmethod
    def of(cls, slots: Sequence[Slot]) -> Self:
        """Counted from the slots."""
        shares = cls()
        for slot in slots:
            if slot.part is not None:
                shares.add(slot.part)
        return shares

    def peer_may(self, peer: str, slots: int) -> bool:
        return self._peers[peer] < max(1, slots // 2)

    def handoff_may(self, transfer_id: bytes, slots: int) -> bool:
        return self._transfers[transfer_id] < max(1, slots // 4)

    def add(self, part: IncomingPart) -> None:
        self._transfers[part.transfer_id] += 1
        self._peers[part.peer] += 1

    def remove(self, part: IncomingPart) -> None:
        _less(self._transfers, part.transfer_id)
        _less(self._peers, part.peer)

    def same_as(self, other: _Shares) -> bool:
        return (self._transfers, self._peers) == (other._transfers, other._peers)


def _less(counter: Counter[K], key: K) -> None:
    """Count one less, and forget a name at zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class Ring:
    """Serves parts round robin over hand-offs: at most a quarter of the ring to one hand-off, half of it to one peer.

    Slots in doubt count against these limits, so a peer's other hand-offs go on with the rest of its half.

    `on_grant(part, slot)` is called for each grant.
    """

    def __init__(self, addresses: list[int], on_grant: Callable[[IncomingPart, Slot], None]):
        self.slots = [Slot(index, address) for index, address in enumerate(addresses)]
        # Of the free slots the one freed last is used first: its memory is still in the processor's cache.
        self._free = list(reversed(range(len(self.slots))))
        self._waiting = Turns()
        self._shares = _Shares()
        self._on_grant = on_grant

    def ask(self, part: IncomingPart) -> None:
        self._waiting.add(part)
        self._grant()

    def slot(self, index: int, generation: int) -> Slot | None:
        """The slot, if this is still its generation, else None."""
        if not 0 <= index < len(self.slots):
            return None
        slot = self.slots[index]
        return slot if slot.generation == generation and slot.part is not None else None

    def take_carried(self, header: handoff_pb2.PartHeader, peer: str) -> bool:
        """Note a part that the control stream has carried; whether its slot was granted to it, and it is the first one."""
        slot = self.slot(header.slot, header.generation)
        if slot is None or slot.carried or slot.machine.state is not S.GRANTED:
            return False
        assert slot.part is not None, "a granted slot has one"
        part = slot.part
        asked = (part.transfer_id, part.peer, part.source_rank, part.number)
        slot.carried = asked == (header.transfer_id, peer, header.source_rank, header.part)
        return slot.carried

    def scattered(self, slot: Slot) -> None:
        """The part landed, was verified and was copied into its blocks."""
        for state in (S.LANDED, S.VERIFIED):
            slot.machine.to(state)
        self._release(slot)

    def landed_wrong(self, slot: Slot) -> None:
        """Free a slot whose part failed its check (its write is terminal: the notification came) or was never sent."""
        slot.machine.to(S.LANDED)
        self._release(slot)

    def quarantine(self, transfer_id: bytes) -> list[Slot]:
        """A transfer has ended early: its slots are in doubt, its waiting parts are dropped."""
        self._waiting.drop(transfer_id)
        doubtful = [
            slot
            for slot in self.slots
            if slot.part is not None
            and slot.part.transfer_id == transfer_id
            and slot.machine.state is not S.QUARANTINED
        ]
        for slot in doubtful:
            self._doubt(slot)
        self._grant()
        return doubtful

    def fence_all(self) -> None:
        """This worker rejoins under a new epoch: all slots that are not FREE are in doubt."""
        self._waiting.clear()
        for slot in self.slots:
            if slot.machine.state not in (S.FREE, S.QUARANTINED):
                self._doubt(slot)

    def in_doubt(self, mine: Callable[[IncomingPart], bool]) -> bool:
        return any(
            slot.machine.state is S.QUARANTINED and slot.part is not None and mine(slot.part)
            for slot in self.slots
        )

    def fence_proven(self, proven: Callable[[IncomingPart], bool]) -> None:
        """Free the slots in doubt that `proven` accepts: all writes are terminal, or the peer's process has exited."""
        for slot in self.slots:
            if slot.machine.state is S.QUARANTINED and slot.part is not None and proven(slot.part):
                self._release(slot)

    def add_segment(self, addresses: list[int]) -> None:
        for address in addresses:
            slot = Slot(len(self.slots), address)
            self.slots.append(slot)
            self._free.append(slot.index)
        self._grant()

    def count(self, state: SlotState) -> int:
        return sum(slot.machine.state is state for slot in self.slots)

    def refused(self, peer: str) -> TransportError | None:
        """The error if the peer's next part is one too many, else None. A sender requests some dozens of parts of each
        hand-off, far below the limit. The limit of one peer does not affect the others."""
        if self._waiting.of(peer) < MAX_WAITING:
            return None
        return TransportError("too many parts wait for a slot", limit=str(MAX_WAITING))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _doubt(self, slot: Slot) -> None:
        assert slot.part is not None, "a slot that is not free has one"
        slot.machine.to(S.QUARANTINED)

    def _release(self, slot: Slot) -> None:
        assert slot.part is not None, "a slot that is not free has one"
        slot.machine.to(S.FREE)
        self._shares.remove(slot.part)
        slot.part = None
        self._free.append(slot.index)
        self._grant()

    def _grant(self) -> None:
        while self._free and (part := self._next()) is not None:
            slot = self.slots[self._free.pop()]
            slot.generation += 1
            slot.part, slot.carried = part, False
            slot.machine.to(S.GRANTED)
            self._shares.add(part)
            self._on_grant(part, slot)

    def _next(self) -> IncomingPart | None:
        slots, shares = len(self.slots), self._shares
        return self._waiting.take(
            lambda peer: shares.peer_may(peer, slots), lambda transfer: shares.handoff_may(transfer, slots)
        )

    def check_integrity(self) -> None:
        free = self.count(S.FREE)
        assert free == len(self._free) == len(set(self._free)), "the free list is not the free slots"
        assert all((slot.part is None) == (slot.machine.state is S.FREE) for slot in self.slots)
        assert self._shares.same_as(_Shares.of(self.slots)), "the shares are not what the slots hold"
        held = sum(self.count(state) for state in (S.GRANTED, S.LANDED, S.VERIFIED))
        assert free + held + self.count(S.QUARANTINED) == len(self.slots)
