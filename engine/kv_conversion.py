"""Chooses the function that rounds the parts of a hand-off to int8 as they are written into the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES
from engine import kv_blocks
from engine.ops.base import has_numba

log = logging.getLogger(__name__)
WritePart = Callable[[Tensor, Tensor, Tensor, int], None]
"""(blocks, numbers, ids, offset): write a part's numbers, flat in the order of the wire, into int8 blocks [block, layer,
K|V, head, token, row], beginning at token `offset` of block ids[0]. `ids`: int64, of the blocks' device."""


def writer(blocks: Tensor, dtype: torch.dtype) -> WritePart:
    """Return the function for parts of `dtype` and caches of the shape and device of `blocks`. It is compiled and tried
    first, so that no part waits for that."""
    made = _compiled(blocks.device)
    if made is None:
        return kv_blocks.write_part
    page, row = blocks.shape[4:]
    numbers = torch.randn(2 * page * (row - SCALE_BYTES), device=blocks.device).to(dtype)
    found = [torch.zeros_like(blocks[:1]) for _ in range(2)]
    ids = torch.zeros(1, dtype=torch.int64, device=blocks.device)
    try:
        for write, own in zip((made, kv_blocks.write_part), found, strict=True):
            write(own[:, -1:, :, -1:], numbers, ids, 0)
        works = torch.equal(*found)
    except Exception:  # no C compiler, a driver that is too old
        log.exception("parts are converted by torch, which is slower: the kernel does not run")
        return kv_blocks.write_part
    if not works:
        log.error("parts are converted by torch, which is slower: the kernel's codes are not those of torch")
    return made if works else kv_blocks.write_part


def temporary_bytes(block_numbers: int, device: torch.device) -> int:
    """Upper bound of the bytes that a `WritePart` takes while it runs. `block_numbers`: of a block of one rank."""
    return 0 if _compiled(device) is not None else kv_blocks.WRITE_PART_BYTES * block_numbers


def _compiled(device: torch.device) -> WritePart | None:
    if device.type == "cpu":
        if not has_numba():
            return None
        from engine.ops.cpu.conversion import write_part

        return write_part
    try:
        from engine.ops.cuda.conversion import write_part as by_triton
    except ImportError as error:
        log.warning("parts are converted by torch, which is slower: %s", error)
        return None
    return by_triton
