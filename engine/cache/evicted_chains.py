"""What the pool tells of evicted blocks: "of this chain only the first `held` blocks are left".

A prefix is evicted tail first, block by block. Its chain is put together once, for the first block, by the walk to the
root; for each further block the same list serves with a smaller `held`:

    chain    h0  h1  h2  h3  h4        all that was cached of it when the run began
                     └──────── held = 2: h4, h3 and h2 have gone since

A chain that shares a prefix with the last one is walked only as far as to where they part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Evicted = Callable[[list[bytes], int], None]


class EvictedChains:
    """`parents`: of every cached block, None for a root. `tell` gets a list that never changes afterwards."""

    def __init__(self, parents: Mapping[bytes, bytes | None], tell: Evicted):
        self._parents = parents
        self._tell = tell
        self._chain: list[bytes] = []
        self._at: dict[bytes, int] = {}  # index in _chain
        self._held = 0  # leading blocks of _chain that are cached
        self._untold = False

    def evicted(self, block_hash: bytes) -> None:
        """Called while `parents` still knows the block."""
        if block_hash not in self._at:
            self.tell()
            if not self._follow(block_hash):
                return
        at = self._at[block_hash]
        if at < self._held:
            self._held = at
            self._untold = True

    def remembered(self, block_hash: bytes) -> None:
        """A block is cached. If it is one of the chain's, how much of that is held is not known any more."""
        if block_hash in self._at:
            self.tell()
            self._chain, self._at, self._held = [], {}, 0

    def tell(self) -> None:
        """At the end of a run, at the latest when whoever took blocks has them."""
        if self._untold:
            self._untold = False
            self._tell(self._chain, self._held)

    def _follow(self, block_hash: bytes) -> bool:
        """Makes `_chain` the one that ends with the block. False: an earlier block is gone, and its going was told as the
        end of all behind it."""
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
        for gone in self._chain[keep:]:
            del self._at[gone]
        self._chain = [*self._chain[:keep], *reversed(tail)]
        self._at.update(zip(self._chain[keep:], range(keep, len(self._chain)), strict=True))
        self._held = len(self._chain)
        return True
