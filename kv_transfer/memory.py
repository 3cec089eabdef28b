"""Registered memory: the landing ring's segments and the send staging, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.config.worker import MAX_SLOT_BYTES, TransferConfig
from cluster.process import huge_pages
from cluster.process.huge_pages import PAGE


def staging_bytes(config: TransferConfig) -> int:
    """Size of a rank's send staging."""
    return max(config.staging_bytes, 2 * config.slot_bytes)


def largest_part(config: TransferConfig) -> int:
    """Bytes of the largest part that a rank sends: two of them fit staging, and one fits any slot."""
    return min(staging_bytes(config) // 2, MAX_SLOT_BYTES)


def first_slots(config: TransferConfig) -> int:
    """Slots of a rank's landing ring at the start."""
    return max(4, config.ring_bytes // config.slot_bytes)


def most_slots(config: TransferConfig) -> int:
    """Slots of a rank's landing ring that has grown to its limit."""
    return max(first_slots(config), config.ring_max_bytes // config.slot_bytes)


def aligned_bytes(size: int) -> Tensor:
    """uint8 [size] in main memory, page-aligned, in huge pages if there are any: faster for RDMA and large copies. Every
    page is touched, so that no page fault happens later."""
    return torch.frombuffer(huge_pages.zeroed(size), dtype=torch.uint8).zero_()


@dataclass(frozen=True)
class Chunk:
    """A piece of staging."""

    offset: int
    size: int


class Staging:
    """First-fit allocator over one buffer. Few pieces live at a time, so a list is enough."""

    def __init__(self, buffer: Tensor):
        self.buffer = buffer
        self.size = buffer.numel()
        self._free: list[Chunk] = [Chunk(0, self.size)]

    @property
    def free_bytes(self) -> int:
        return sum(chunk.size for chunk in self._free)

    def allocate(self, size: int) -> Chunk | None:
        rounded = -(-size // PAGE) * PAGE
        for index, chunk in enumerate(self._free):
            if chunk.size >= rounded:
                rest = Chunk(chunk.offset + rounded, chunk.size - rounded)
                self._free[index : index + 1] = [rest] if rest.size else []
                return Chunk(chunk.offset, rounded)
        return None

    def free(self, chunk: Chunk) -> None:
        merged: list[Chunk] = []
        for piece in sorted([*self._free, chunk], key=lambda c: c.offset):
            if merged and merged[-1].offset + merged[-1].size == piece.offset:
                merged[-1] = Chunk(merged[-1].offset, merged[-1].size + piece.size)
            else:
                merged.append(piece)
        self._free = merged

    def view(self, chunk: Chunk, size: int) -> Tensor:
        return self.buffer[chunk.offset : chunk.offset + size]
