"""The order of waiting claims: round robin over peers, then over each peer's hand-offs, first in first out within one.

So a hand-off that needs few slots does not wait behind all claims that arrived before it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One part that waits for a slot or has one."""

    transfer_id: bytes
    peer: str  # worker_id@epoch
    source_rank: int
    part: int
    bytes: int


class Turns:
    """The queue of waiting claims. `take` and `drop` cost O(peers), independent of the number of claims and hand-offs."""

    def __init__(self) -> None:
        # In the order of turns: the next one first.
        self._peers: OrderedDict[str, OrderedDict[bytes, deque[Claim]]] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._counts.total()

    def of(self, peer: str) -> int:
        return self._counts[peer]

    def add(self, claim: Claim) -> None:
        handoffs = self._peers.setdefault(claim.peer, OrderedDict())
        handoffs.setdefault(claim.transfer_id, deque()).append(claim)
        self._counts[claim.peer] += 1

    def take(self, peer_may: Callable[[str], bool], handoff_may: Callable[[bytes], bool]) -> Claim | None:
        """Remove and return the next claim that `peer_may` and `handoff_may` allow; the others keep their turn."""
        for peer, handoffs in self._peers.items():
            if not peer_may(peer):
                continue
            for transfer_id, claims in handoffs.items():
                if handoff_may(transfer_id):
                    claim = claims.popleft()
                    self._counts[peer] -= 1
                    self._end_turn(peer, handoffs, transfer_id)
                    return claim
        return None

    def _end_turn(self, peer: str, handoffs: OrderedDict[bytes, deque[Claim]], transfer_id: bytes) -> None:
        self._peers.move_to_end(peer)
        handoffs.move_to_end(transfer_id)
        if not handoffs[transfer_id]:
            self._forget(peer, transfer_id)

    def drop(self, transfer_id: bytes) -> None:
        """Remove all claims of a transfer."""
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
