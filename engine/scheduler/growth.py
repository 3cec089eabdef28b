"""Growth of running sequences without a free block: what new requests must leave free for it.

If every block of growth evicted a reservation, the same hand-off would be evicted again and again, because it is the
youngest each time it returns. Therefore the amount set aside doubles with each eviction: a sequence that grows by n
blocks evicts O(log n) times, and new reservations are refused before anything is computed for them.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S

# Set aside at the first eviction: as many tokens as a decode worker reserves for a new request's growth.
SET_ASIDE_TOKENS = 256


class GrowthClaims:
    """Blocks that new requests must leave free for running sequences: those that a sequence lacked in the last step,
    and those set aside for one whose growth has evicted a reservation."""

    def __init__(self, page_size: int, max_model_len: int):
        self._page = page_size
        self._max_len = max_model_len  # 0 = unknown
        self._short: dict[Sequence, int] = {}  # left out of the last step for so many blocks
        self._up_to: dict[Sequence, int] = {}  # set aside: total blocks up to which a sequence may grow

    def __len__(self) -> int:
        """Sequences with a claim, whether it counts in this step or not."""
        return len(self._short.keys() | self._up_to.keys())

    def begin_step(self) -> None:
        self._short.clear()

    def short_of(self, sequence: Sequence, blocks: int) -> None:
        self._short[sequence] = blocks

    def evicted_for(self, sequence: Sequence) -> None:
        output = len(sequence.tokens) - sequence.num_prompt
        left = sequence.request.sampling.max_tokens - output
        length = len(sequence.tokens) + max(1, min(left, max(SET_ASIDE_TOKENS, output)))
        self._up_to[sequence] = -(-min(length, self._max_len or length) // self._page)

    def of(self, rank: int) -> dict[Sequence, int]:
        """Blocks claimed by running sequences of class `rank` or a higher one."""
        claims = {s: max(0, up_to - len(s.blocks)) for s, up_to in self._up_to.items()}
        for sequence, count in self._short.items():
            claims[sequence] = max(count, claims.get(sequence, 0))
        return {s: n for s, n in claims.items() if s.state is S.RUNNING and not s.paused and s.rank <= rank}

    def preempted(self, sequence: Sequence) -> None:
        """Forget the blocks that it lacked. Blocks that are set aside for it count again once it runs."""
        self._short.pop(sequence, None)

    def remove(self, sequence: Sequence) -> None:
        self._short.pop(sequence, None)
        self._up_to.pop(sequence, None)
