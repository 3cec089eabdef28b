"""bf16 rows of products, in memory behind which nothing can be read or written."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def guarded(shape: tuple[int, int], to_read: bool) -> tuple[Tensor, mmap.mmap]:
    """bf16 that ends where memory does: the page behind cannot be touched. `to_read`: random numbers, else NaN."""
    size = shape[0] * shape[1] * 2
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages), mmap.PAGESIZE, 0) == 0
    rows = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2, offset=pages - size).view(shape)
    rows.copy_(numbers(*shape, seed=2)) if to_read else rows.fill_(torch.nan)
    return rows, memory
