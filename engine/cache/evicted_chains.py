"""Reports of evicted blocks: "of this chain only the first `held` blocks are still cached".

A prefix is evicted tail first, block by block. For the first block the walk to the root builds the chain; each further
block reuses the list with a smaller `held`:

    chain    h0  h1  h2  h3  h4        all that was cached of it when the run began
                     └──────── held = 2: h4, h3 and h2 have been evicted since

For a chain that shares a prefix with the last one, the walk ends where the two meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Evicted = Callable[[list[bytes], int], None]


class EvictedChains:
    """Builds the reports. `parents`: block hash → parent's hash, None for a root, of every cached block.

    `on_evicted(chain, held)` receives hashes from the root; the list is not changed afterwards.
    """

    def __init__(self, parents: Mapping[bytes, bytes | None], on_evicted: Evicted):
        self._parents = parents
        self._on_evicted = on_evicted
        self._chain: list[bytes] = []
        self._at: dict[bytes, int] = {}  # index in _chain
        self._held = 0  # leading blocks of _chain that are cached
        self._unreported = False

    def evicted(self, block_hash: bytes) -> None:
        """Note an evicted block; call it while `parents` still has it."""
        if block_hash not in self._at:
            self.report()
            if not self._follow(block_hash):
                return
        at = self._at[block_hash]
        if at < self._held:
            self._held = at
            self._unreported = True

    def registered(self, block_hash: bytes) -> None:
        """Note a newly cached block. If it belongs to the current chain, `held` is outdated and the chain is dropped."""
        if block_hash in self._at:
            self.report()
            self._chain, self._at, self._held = [], {}, 0

    def report(self) -> None:
        """Report the current run of evictions; call it at the latest when an allocation is complete."""
        if self._unreported:
            self._unreported = False
            self._on_evicted(self._chain, self._held)

    def _follow(self, block_hash: bytes) -> bool:
        """Make `_chain` the chain that ends with the block.

        Returns False if an earlier block is not cached: the report of that one covers all blocks behind it.
        """
        tail: list[bytes] = []
        node: bytes | None = block_hash
        while node is not None and node not in self._at:
            if node not in self._parents:
                return False
            tail.append(node)
            node = self._parents[node]
        keep = 0 if node is None else self._at[node] + 1
        if keep > self._held:
            return False
        for evicted in self._chain[keep:]:
            del self._at[evicted]
        self._chain = [*self._chain[:keep], *reversed(tail)]
        self._at.update(zip(self._chain[keep:], range(keep, len(self._chain)), strict=True))
        self._held = len(self._chain)
        return True
