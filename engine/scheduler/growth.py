"""When blocks are short: which sequence frees its own, and growth of a running sequence without a free block: which
reservation it may evict, and how much it then sets aside.

If every block of growth evicted a reservation, the same hand-off would be evicted again and again, because it is the
youngest each time it returns. Therefore the amount set aside doubles with each eviction: a sequence that grows by n
blocks evicts O(log n) times, and new reservations are refused before anything is computed for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S

# Set aside at the first eviction: as many tokens as a decode worker reserves for a new request's growth.
SET_ASIDE_TOKENS = 256


def choose_victim(candidates: Seq[Sequence], holders: Iterable[Sequence]) -> Sequence:
    """Of the lowest class, then of the tenant that holds most blocks for its weight, the youngest.

    `candidates` is not empty; the shares of tenants are counted over `holders`. Tenants with equal shares count as one:
    the youngest of them all is chosen.
    """
    lowest = max(one.rank for one in candidates)
    candidates = [one for one in candidates if one.rank == lowest]
    if len({one.request.tenant for one in candidates}) > 1:
        blocks: Counter[str] = Counter()
        for one in holders:
            blocks[one.request.tenant] += len(one.blocks)
        shares = [blocks[one.request.tenant] / one.request.weight for one in candidates]
        largest = max(shares)
        candidates = [one for one, share in zip(candidates, shares, strict=True) if share == largest]
    return max(candidates, key=lambda one: one.arrival)


def reservation_for(rank: int, sequences: Seq[Sequence]) -> Sequence | None:
    """The reservation, of class `rank` or a lower one, that a growing sequence of that class evicts; None if none."""
    reserved = [s for s in sequences if s.state is S.WAITING_FOR_KV and s.rank >= rank]
    return choose_victim(reserved, sequences) if reserved else None


class GrowthClaims:
    """Blocks that new requests must leave free for running sequences: those that a sequence lacked in the last step,
    and those set aside for one whose growth has evicted a reservation."""

    def __init__(self, page_size: int, max_model_len: int):
        self._page = page_size
        self._max_len = max_model_len  # 0 = unknown
        self._short: dict[Sequence, int] = {}  # left out of the last step for so many blocks
        self._up_to: dict[Sequence, int] = {}  # set aside: total blocks up to which a sequence may grow

    def begin_step(self) -> None:
        self._short.clear()

    def short_of(self, sequence: Sequence, blocks: int) -> None:
        self._short[sequence] = blocks

    def evicted_for(self, sequence: Sequence) -> None:
        output = len(sequence.tokens) - sequence.num_prompt
        left = sequence.request.sampling.max_tokens - output
        length = len(sequence.tokens) + max(1, min(left, max(SET_ASIDE_TOKENS, output)))
        self._up_to[sequence] = -(-min(length, self._max_len or length) // self._page)

    def blocks(self, rank: int) -> int:
        """Blocks claimed by running sequences of class `rank` or a higher one."""
        claims = {s: max(0, up_to - len(s.blocks)) for s, up_to in self._up_to.items()}
        for sequence, count in self._short.items():
            claims[sequence] = max(count, claims.get(sequence, 0))
        return sum(n for s, n in claims.items() if s.state is S.RUNNING and not s.paused and s.rank <= rank)

    def remove(self, sequence: Sequence) -> None:
        self._short.pop(sequence, None)
        self._up_to.pop(sequence, None)
