"""Digests of parts: they detect corruption, not attackers. Each part names the kind of its digest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

NONE = ""
XXH3_128 = "xxh3_128"  # CPU: 35–87 GB/s measured
SUM64 = "sum64"  # expressible in torch, so it runs where the bytes are on CUDA

MODES = ("off", "sample", "all")  # from the laxest to the strictest


def stricter(one: str, other: str) -> str:
    """The stricter of two MODES."""
    return max(one, other, key=MODES.index)


class Digests:
    """Which parts carry a digest: all, none, or a sample chosen by transfer id and part, so that both sides choose the
    same parts, and a part that is sent again is treated as before."""

    def __init__(self, mode: str, sample_share: float, kind: str):
        """`mode`: one of MODES. `kind`: agreed with the peer."""
        self._kind = kind
        self._below = {"off": 0, "all": 2**64}.get(mode, int(sample_share * 2**64))

    def kind_of(self, transfer_id: bytes, source_rank: int, target_rank: int, part: int) -> str:
        if self._below in (0, 2**64):
            return self._kind if self._below else NONE
        name = transfer_id + source_rank.to_bytes(4) + target_rank.to_bytes(4) + part.to_bytes(8)
        return self._kind if xxhash.xxh3_64_intdigest(name) < self._below else NONE


def digest(pieces: Sequence[Tensor], kind: str) -> bytes:
    """Digest of the bytes of all pieces (contiguous uint8), one after the other."""
    if kind == NONE:
        return b""
    if kind == XXH3_128:
        return _xxh3(pieces)
    if kind == SUM64:
        return _sum64(pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces)))
    raise ValueError(f"unknown digest kind {kind!r}")


def _xxh3(pieces: Sequence[Tensor]) -> bytes:
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0].numpy().data)
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece.numpy().data)
    return state.digest()


def _sum64(data: Tensor) -> bytes:
    """Sum of 32-bit words and of words weighted by their index, both modulo 2^64: so that moved words change it too."""
    words = data[: data.numel() // 4 * 4].view(torch.int32).to(torch.int64)
    index = torch.arange(1, words.numel() + 1, device=data.device)
    total = int(words.sum()) + int(data[words.numel() * 4 :].sum())
    weighted = int((words * index).sum())
    return (total % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little")
