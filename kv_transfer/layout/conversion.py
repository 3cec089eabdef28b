"""Parts in another format than the cache's: a decode worker converts them as it scatters them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_transfer.layout.rows import Place, check_blocks


@dataclass(frozen=True)
class Conversion:
    """`write(blocks, token, numbers)` writes numbers [..., tokens, dim] into blocks [..., token, row] of the cache,
    beginning at `token`."""

    dtype: torch.dtype  # of the numbers in a part
    head_dim: int
    write: Callable[[Tensor, int, Tensor], None]

    @property
    def row_bytes(self) -> int:
        """Of one token in one head of one layer, in a part."""
        return self.head_dim * self.dtype.itemsize

    def scatter(self, cache: Tensor, part: Tensor, place: Place) -> None:
        """`part`: bytes. Raises IndexError for a block that does not exist."""
        check_blocks(cache, place)
        numbers = part.view(self.dtype)
        layers, heads = place.layers, place.heads
        own = cache[:, layers.start : layers.stop, :, heads.start : heads.stop]
        row = len(layers) * 2 * len(heads) * self.head_dim
        for span in place.spans(cache.shape[4]):
            count = span.tokens // span.blocks
            inside = numbers[span.token * row : (span.token + span.tokens) * row]
            # Block by block: what lies between stays in the second-level cache, and takes no more memory than that.
            for index, one in enumerate(
                inside.view(span.blocks, len(layers), 2, len(heads), count, self.head_dim)
            ):
                self.write(own[span.block + index], span.offset, one)
