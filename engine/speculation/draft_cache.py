"""The KV pool of a draft model: a cache by sequence, from which the least recently used one is dropped.

tokens of the sequence   ────────────────────────────────────┐
a sequence's KV          ──────── length ────────┬── drafted ─┴──
                         tokens that it still has │ drafts since: kept as far as they were accepted
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S


@dataclass(eq=False)
class CachedSequence:
    row: int  # of the draft model's block tables
    blocks: list[int] = field(default_factory=list)
    blocks_in_row: int = 0  # leading blocks that the row holds
    length: int = 0  # leading tokens of the sequence whose KV is in the blocks
    drafted: list[int] = field(default_factory=list)  # the tokens whose KV is behind these

    def trim(self, tokens: list[int]) -> None:
        """Keep the KV of tokens that the sequence has, its last token excepted: from that one the next is drafted.
        A sequence that was left out of the step after its drafts has no token more."""
        self.length = min(self.length, len(tokens) - 1)
        for token in self.drafted:
            if self.length >= len(tokens) - 1 or token != tokens[self.length]:
                break
            self.length += 1
        self.drafted = []


class DraftCache:
    """Blocks and table rows of the draft model. It holds whole sequences only: two that do not fit together would
    otherwise hold parts of the pool, and none get drafts."""

    def __init__(self, num_blocks: int, page_size: int, rows: int):
        self._page = page_size
        self._total, self._total_rows = num_blocks, rows
        self._free = list(range(num_blocks))
        self._rows = list(range(rows))
        self._cached = dict[Sequence, CachedSequence]()  # the least recently used first

    def __len__(self) -> int:
        return len(self._cached)

    def drop_stopped(self) -> None:
        """Drop sequences that run no more."""
        for sequence in [one for one in self._cached if one.state is not S.RUNNING]:
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        if (cached := self._cached.pop(sequence, None)) is not None:
            self._free += cached.blocks
            self._rows.append(cached.row)

    def hold(self, sequence: Sequence, tokens: int, keep: Container[Sequence]) -> CachedSequence | None:
        """Return the sequence's entry, trimmed, with blocks for `tokens` tokens. Sequences outside of `keep`, which has
        this one, are dropped for it; if that would not suffice, it is dropped itself, and None returned."""
        cached = self._cached.pop(sequence, None)
        if cached is None:
            if not self._rows and not self._drop_oldest(keep):
                return None
            cached = CachedSequence(self._rows.pop())
        self._cached[sequence] = cached
        missing = -(-tokens // self._page) - len(cached.blocks)
        others = sum(len(cached.blocks) for one, cached in self._cached.items() if one not in keep)
        if missing > len(self._free) + others:
            self.drop(sequence)
            return None
        while missing > len(self._free):
            self._drop_oldest(keep)
        for _ in range(missing):
            cached.blocks.append(self._free.pop())
        cached.trim(sequence.tokens)
        return cached

    def _drop_oldest(self, keep: Container[Sequence]) -> bool:
        oldest = next((one for one in self._cached if one not in keep), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def check_integrity(self) -> None:
        """Every block and row is free or held by one sequence."""
        held = list(self._cached.values())
        blocks = sorted([*self._free, *(block for one in held for block in one.blocks)])
        assert blocks == list(range(self._total)), "blocks of the draft model's pool"
        assert sorted([*self._rows, *(one.row for one in held)]) == list(range(self._total_rows)), "rows"
