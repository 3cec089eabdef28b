"""Registered memory: the landing ring's segments and the send staging."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.process import huge_pages
from cluster.process.huge_pages import PAGE


def aligned_bytes(size: int, device: torch.device) -> Tensor:
    """uint8 [size], page-aligned, in huge pages if there are any: faster for RDMA and large copies. Every page is touched,
    so that no page fault happens later."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(huge_pages.zeroed(size), dtype=torch.uint8).zero_()


@dataclass(frozen=True)
class Chunk:
    """A piece of staging."""

    offset: int
    size: int


class Staging:
    """First-fit allocator over one buffer. Few pieces live at a time, so a list is enough."""

    def __init__(self, size: int, device: torch.device):
        self.buffer = aligned_bytes(size, device)
        self._free: list[Chunk] = [Chunk(0, size)]
        self.size = size

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
