"""Digests of parts: they detect corruption, not attackers. The wire says which kind was used."""

from __future__ import annotations

import torch
import xxhash
from torch import Tensor

NONE = ""
XXH3_128 = "xxh3_128"  # CPU: 35–87 GB/s measured
SUM64 = "sum64"  # expressible in torch, so it runs where the bytes are on CUDA


def kind_for(device: torch.device, enabled: bool) -> str:
    if not enabled:
        return NONE
    return XXH3_128 if device.type == "cpu" else SUM64


def digest(data: Tensor, kind: str) -> bytes:
    """`data`: contiguous uint8."""
    if kind == NONE:
        return b""
    if kind == XXH3_128:
        return xxhash.xxh3_128_digest(data.numpy().data)
    if kind == SUM64:
        return _sum64(data)
    raise ValueError(f"unknown digest kind {kind!r}")


def _sum64(data: Tensor) -> bytes:
    """Sum of 32-bit words and of words weighted by their index, both modulo 2^64: catches moved words too."""
    words = data[: data.numel() // 4 * 4].view(torch.int32).to(torch.int64)
    index = torch.arange(1, words.numel() + 1, device=data.device)
    total = int(words.sum()) + int(data[words.numel() * 4 :].sum())
    weighted = int((words * index).sum())
    return (total % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little")
