"""Spare blocks: those that scheduled sequences have for drafts, until the end of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.cache.block_pool import BlockPool
from engine.scheduler.blocks import Blocks
from engine.scheduler.growth import GrowthClaims
from engine.scheduler.refusals import Refusals
from engine.scheduler.sequence import Sequence


class SpareBlocks:
    """`running`: all running sequences, as they are at each call. `wanted`: whether waiting sequences want all free
    blocks."""

    def __init__(
        self,
        pool: BlockPool,
        blocks: Blocks,
        claims: GrowthClaims,
        refusals: Refusals,
        running: Mapping[Sequence, None],
        wanted: Callable[[], bool],
    ):
        self._pool = pool
        self._blocks = blocks
        self._claims = claims
        self._refusals = refusals
        self._running = running
        self._wanted = wanted
        self._held: dict[Sequence, int] = {}  # sequence → its blocks before this step's spare ones

    def grow(self, sequence: Sequence, tokens: int) -> int:
        """Allocate spare blocks, until the end of the step, for the first `tokens` tokens of a scheduled sequence, as
        far as there are any. Returns how many of the tokens have blocks."""
        held = len(sequence.blocks)
        if (wanted := self._blocks.count(tokens) - held) <= 0:
            return tokens
        if (more := min(wanted, self._free())) <= 0:
            return min(tokens, self._blocks.tokens(held))
        self._held.setdefault(sequence, held)
        tokens = min(tokens, self._blocks.tokens(held + more))
        self._blocks.grow(sequence, tokens)
        return tokens

    def tokens(self, sequence: Sequence) -> int:
        """As many tokens of a scheduled sequence as would have blocks after `grow`, were it the only one."""
        return self._blocks.tokens(len(sequence.blocks) + max(0, self._free()))

    def _free(self) -> int:
        """How many free blocks drafts may take: those without a cached prefix, as long as one for each running sequence
        and all that are claimed stay free. None while sequences wait."""
        if self._wanted():
            return 0
        lowest = max(one.rank for one in self._running)
        claimed = sum(count for _, count in self._refusals.claims()) + sum(self._claims.of(lowest).values())
        return min(self._pool.num_free_uncached, self._pool.num_free - len(self._running) - claimed)

    def release(self) -> None:
        """Free the blocks that `grow` has allocated in this step, except those of accepted tokens."""
        for sequence, held in self._held.items():
            self._blocks.shrink(sequence, max(held, self._blocks.count(len(sequence.tokens))))
        self._held.clear()
