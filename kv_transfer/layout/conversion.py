"""Parts in another format than the cache's: a decode worker converts them as it scatters them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.layout.rows import CacheRegion


@dataclass(frozen=True)
class Conversion:
    """`write(blocks, numbers, ids, offset)` writes a part's numbers, flat in the order of the wire, into the blocks with
    these ids, beginning at token `offset` of the first. `blocks` are the cache's, [block, layer, K|V, head, token, row],
    with the part's layers and heads; `ids` is int64 on the cache's device. Nothing is read back to the host."""

    dtype: torch.dtype  # of the numbers in a part
    head_dim: int
    write: Callable[[Tensor, Tensor, Tensor, int], None]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one head of one layer, in a part."""
        return self.head_dim * self.dtype.itemsize

    def scatter(self, cache: Tensor, part: Tensor, region: CacheRegion, ids: Tensor) -> None:
        """`part`: bytes; `ids`: the blocks of `region`, all of which exist."""
        layers, heads = region.layers, region.heads
        own = cache[:, layers.start : layers.stop, :, heads.start : heads.stop]
        self.write(own, part.view(self.dtype), ids, region.tokens.start % cache.shape[4])
