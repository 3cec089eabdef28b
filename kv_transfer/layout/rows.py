"""The copies of geometry.py for main memory, as rows of bytes: numpy copies rows of any size without the interpreter's
lock, about twice as fast as torch, and many scattered blocks with one call.

A row is the longest piece of a block that is contiguous in the cache: its layers, or, where the part has some of the
heads only, those heads of one layer's K or V. In the part rows follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.protocol import kv_format

Bytes = NDArray[np.uint8]
Void = NDArray[np.void]
FEW_RUNS = 4  # up to here one copy per run of consecutive blocks beats picking rows one by one


@dataclass(frozen=True)
class CacheRegion:
    """Where a part lies in a rank's cache. `heads` are indices of the rank, `block_ids` those of `tokens`, in order."""

    layers: range
    heads: range
    tokens: range
    block_ids: Sequence[int]

    def spans(self, page_size: int) -> Iterator[Span]:
        ids, token_begin, token_end = self.block_ids, self.tokens.start, self.tokens.stop
        position, index = token_begin, 0
        while position < token_end:
            block, offset = ids[index], position % page_size
            run = 1
            if offset == 0 and token_end - position >= page_size:
                whole = (token_end - position) // page_size
                while run < whole and ids[index + run] == block + run:
                    run += 1
                count = run * page_size
            else:
                count = min(page_size - offset, token_end - position)
            yield Span(block, run, offset, position - token_begin, count)
            position += count
            index += run


@dataclass(frozen=True)
class Span:
    """A run of tokens in physically consecutive blocks, or inside one block."""

    block: int
    blocks: int
    offset: int  # in the first block
    token: int  # index in the part
    tokens: int


@dataclass(frozen=True)
class HostPart:
    """One part beside the cache it belongs to, contiguous [block, layer, K|V, head, token, dim], both as plain
    bytes."""

    cache: Bytes
    part: Bytes
    cache_shape: tuple[int, ...]
    token_bytes: int  # of one head, K or V
    region: CacheRegion
    quantized: bool

    @classmethod
    def of(cls, cache: Tensor, part: Tensor, region: CacheRegion) -> HostPart | None:
        """None if the bytes are not contiguous in main memory. Raises IndexError for a block that does not exist."""
        if cache.device.type != "cpu" or not (cache.is_contiguous() and part.is_contiguous()):
            return None
        check_blocks(cache, region)
        size = cache.shape[5] * cache.element_size()
        quantized = cache.dtype is torch.int8
        return cls(_bytes(cache), _bytes(part), tuple(cache.shape), size, region, quantized)

    def gather(self) -> None:
        if self._scattered:
            # mode "clip": with "raise" numpy would buffer the whole output; the ids were checked above.
            np.take(self.cache.view(self._row), self._index(), out=self.part.view(self._row), mode="clip")
            return
        for inside_cache, inside_part in self._pairs():
            np.copyto(inside_part, inside_cache)

    def pieces(self, least_bytes: int) -> list[slice] | None:
        """The part as contiguous pieces of the cache's bytes, in the part's order; None if one would be shorter than
        `least_bytes`."""
        row = len(self.region.layers) * self._layer_bytes
        if self._cut or not self._whole or row < least_bytes:
            return None
        num_layers = self.cache_shape[1]
        found = []
        for span in self.region.spans(self._page):
            # Blocks that touch each other.
            joined = span.blocks if len(self.region.layers) == num_layers else 1
            for block in range(span.block, span.block + span.blocks, joined):
                first = (block * num_layers + self.region.layers.start) * self._layer_bytes
                found.append(slice(first, first + joined * row))
        return found

    def scatter(self) -> None:
        if self._scattered:
            self.cache.view(self._row)[self._index()] = self.part.view(self._row)
            return
        for inside_cache, inside_part in self._pairs():
            np.copyto(inside_cache, inside_part)

    @property
    def _page(self) -> int:
        return self.cache_shape[4]

    @property
    def _whole(self) -> bool:
        """All heads of the cache."""
        return len(self.region.heads) == self.cache_shape[3]

    @property
    def _head_bytes(self) -> int:
        """Bytes of one head of a block, K or V, in one layer."""
        return self._page * self.token_bytes

    @property
    def _layer_bytes(self) -> int:
        return 2 * self.cache_shape[3] * self._head_bytes

    @property
    def _row(self) -> np.dtype[np.void]:
        return np.dtype((np.void, self._layer_bytes if self._whole else self._head_bytes))

    @property
    def _scattered(self) -> bool:
        """Whether it is many runs of whole blocks: the part, too, is a table of rows."""
        return not self._cut and int(np.count_nonzero(np.diff(self.region.block_ids) != 1)) >= FEW_RUNS

    @property
    def _cut(self) -> bool:
        """Whether a block at one of its ends is not whole."""
        return bool(self.region.tokens.start % self._page or self.region.tokens.stop % self._page)

    def _index(self) -> NDArray[np.intp]:
        """The cache's rows in the part's order."""
        _, num_layers, _, num_heads, _, _ = self.cache_shape
        layers = np.arange(self.region.layers.start, self.region.layers.stop)
        rows = np.asarray(self.region.block_ids, dtype=np.intp)[:, None] * num_layers + layers
        if self._whole:
            return rows.reshape(-1)
        planes = rows[:, :, None] * 2 + np.arange(2)
        heads = np.arange(self.region.heads.start, self.region.heads.stop)
        return (planes[:, :, :, None] * num_heads + heads).reshape(-1)

    def _pairs(self) -> Iterator[tuple[Void, Void]]:
        """Views of equal shape, runs of whole blocks and planes of cut blocks: (in the cache, in the part)."""
        num_layers = self.cache_shape[1]
        token = len(self.region.layers) * 2 * len(self.region.heads) * self.token_bytes
        layer, head = self._layer_bytes, self._head_bytes
        for span in self.region.spans(self._page):
            count = span.tokens // span.blocks
            shape: tuple[int, ...] = (span.blocks, len(self.region.layers), 2, len(self.region.heads))
            strides: tuple[int, ...] = (num_layers * layer, layer, layer // 2, head)
            block = (span.block * num_layers + self.region.layers.start) * layer
            block += self.region.heads.start * head
            if count < self._page:
                own = count * self.token_bytes  # of one head in the part
                together = (own * shape[3] * 2 * shape[1], own * shape[3] * 2, own * shape[3], own)
                for plane in kv_format.planes(self.token_bytes, quantized=self.quantized):
                    piece = np.dtype((np.void, count * plane.row))
                    first = block + self._page * plane.before + span.offset * plane.row
                    inside_cache: Void = np.ndarray(shape, piece, self.cache.data, first, strides)
                    first = span.token * token + count * plane.before
                    yield inside_cache, np.ndarray(shape, piece, self.part.data, first, together)
                continue
            if self._whole:
                row, shape, strides = len(self.region.layers) * layer, shape[:1], strides[:1]
            else:
                row, shape, strides = len(self.region.heads) * head, shape[:3], strides[:3]
            piece = np.dtype((np.void, row))
            inside_cache = np.ndarray(shape, piece, self.cache.data, block, strides)
            inside_part: Void = np.ndarray(shape, piece, self.part.data, span.token * token)
            yield inside_cache, inside_part


def check_blocks(cache: Tensor, region: CacheRegion) -> None:
    """Raise IndexError for a block that does not exist."""
    ids = region.block_ids
    if ids and not 0 <= min(ids) <= max(ids) < cache.shape[0]:
        raise IndexError(f"blocks {min(ids)}…{max(ids)} of a cache of {cache.shape[0]}")


def _bytes(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.view(-1).view(torch.uint8).numpy()
    return flat
