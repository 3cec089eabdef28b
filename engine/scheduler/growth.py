"""Growth of a running sequence without a free block: which reservation it may evict, and how much it then sets aside.

If every block of growth evicted a reservation, the same hand-off would be evicted again and again, because it is the
youngest each time it returns. Therefore the amount set aside doubles with each eviction: a sequence that grows by n
blocks evicts O(log n) times, and new reservations are refused before anything is computed for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence
from engine.scheduler.states import SequenceState as S
from engine.scheduler.victim import choose_victim

# Set aside at the first eviction: as many tokens as a decode worker reserves for a new request's growth.
SET_ASIDE_TOKENS = 256
HIGHEST_RANK = -1


def reservation_for(wanting_rank: int, everyone: Seq[Sequence]) -> Sequence | None:
    """The reservation to evict, of the growing sequence's class or a lower one; None if there is none."""
    reserved = [s for s in everyone if s.state is S.WAITING_FOR_KV and s.rank >= wanting_rank]
    return choose_victim(reserved, everyone) if reserved else None


class PreemptionReserve:
    """Blocks that new requests must leave free for sequences whose growth has evicted a reservation."""

    def __init__(self, page_size: int, max_model_len: int):
        self._page = page_size
        self._max_len = max_model_len  # 0 = unknown
        self._up_to: dict[Sequence, int] = {}  # total blocks up to which a sequence may grow

    def evicted_for(self, sequence: Sequence) -> None:
        output = len(sequence.tokens) - sequence.num_prompt
        left = sequence.request.sampling.max_tokens - output
        length = len(sequence.tokens) + max(1, min(left, max(SET_ASIDE_TOKENS, output)))
        self._up_to[sequence] = -(-min(length, self._max_len or length) // self._page)

    def owed(self, sequence: Sequence) -> int:
        return max(0, self._up_to.get(sequence, 0) - len(sequence.blocks))

    def sequences(self) -> Seq[Sequence]:
        return list(self._up_to)

    def remove(self, sequence: Sequence) -> None:
        self._up_to.pop(sequence, None)
