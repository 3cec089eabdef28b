"""Divides a part into rows of equal length, for devices that copy many rows with one indexed operation.

          cut block │        whole blocks        │ cut block
    tokens ─────────┼────────────────────────────┼──────────►
        CacheRegion │ rows of the cache, indexed │ CacheRegion

A row is a layer of a block if the part has all heads, else a group of neighbouring heads of one layer's K or V: as many
as divide the cache's heads, the part's heads and the first of these. The at most two cut blocks at the ends of a part are
copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kv_transfer.layout.rows import CacheRegion


@dataclass(frozen=True)
class Rows:
    """Whole blocks: row i of the part is row `index[i]` of the cache. `begin`: the part's element at which they begin."""

    index: NDArray[np.int64]
    row_elements: int
    begin: int


@dataclass(frozen=True)
class CacheRows:
    """A cache [block, layer, K|V, head, token, dim] as a table of rows."""

    num_blocks: int
    num_layers: int
    num_heads: int
    page_size: int
    head_dim: int

    @classmethod
    def of(cls, cache: Tensor) -> CacheRows:
        blocks, layers, _, heads, page, dim = cache.shape
        return cls(blocks, layers, heads, page, dim)

    @property
    def least_elements(self) -> int:
        """Elements of the shortest row: one head."""
        return self.page_size * self.head_dim

    def check(self, region: CacheRegion) -> None:
        """Raise IndexError for a block that does not exist: on a device it would be an error of the whole process."""
        ids = region.block_ids
        if ids and not 0 <= min(ids) <= max(ids) < self.num_blocks:
            raise IndexError(f"blocks {min(ids)}…{max(ids)} of a cache of {self.num_blocks}")

    def whole(self, region: CacheRegion) -> Rows | None:
        """The part's whole blocks; None if it has none."""
        page, begin, end = self.page_size, *self._border(region)
        if begin >= end:
            return None
        first = region.tokens.start // page
        ids = np.asarray(region.block_ids[begin // page - first : end // page - first], dtype=np.int64)
        layers = np.arange(region.layers.start, region.layers.stop, dtype=np.int64)
        rows = ids[:, None] * self.num_layers + layers
        inside = (begin - region.tokens.start) * self._token_elements(region)
        if len(region.heads) == self.num_heads:
            return Rows(rows.reshape(-1), 2 * self.num_heads * self.least_elements, inside)
        together = math.gcd(len(region.heads), region.heads.start, self.num_heads)
        planes = rows[:, :, None] * 2 + np.arange(2)
        heads = np.arange(region.heads.start // together, region.heads.stop // together)
        index = planes[:, :, :, None] * (self.num_heads // together) + heads
        return Rows(index.reshape(-1), together * self.least_elements, inside)

    def cut(self, region: CacheRegion) -> Iterator[tuple[CacheRegion, int]]:
        """The part's cut blocks, each as a region with the part's element at which it begins."""
        page, begin, end = self.page_size, *self._border(region)
        tokens = region.tokens
        for some in (range(tokens.start, min(begin, tokens.stop)), range(max(end, begin), tokens.stop)):
            if some:
                block = some.start // page - tokens.start // page
                cut = replace(region, tokens=some, block_ids=region.block_ids[block : block + 1])
                yield cut, (some.start - tokens.start) * self._token_elements(region)

    def _border(self, region: CacheRegion) -> tuple[int, int]:
        """(begin, end) of the tokens in the part's whole blocks; begin ≥ end if it has none."""
        page, tokens = self.page_size, region.tokens
        return -(-tokens.start // page) * page, tokens.stop // page * page

    def _token_elements(self, region: CacheRegion) -> int:
        return len(region.layers) * 2 * len(region.heads) * self.head_dim
