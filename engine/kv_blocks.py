"""Blocks of the KV cache: their shape, and int8 quantisation by torch, the reference of the kernels for CPUs.

A cache in int8 is a tensor of bytes, [block, layer, K|V, head, token, dim + 2]: the last two dimensions together are the
planes of cluster/protocol/kv_format.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES

MOST = 127.0  # largest magnitude of a code
WRITE_PART_BYTES = 12  # upper bound of the temporaries of `write_part`, for each number of a block


@dataclass(frozen=True)
class KvSpec:
    """A block of one rank's pool."""

    shape: tuple[int, ...]  # [layer, K|V, head, token, row]
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: int, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> KvSpec:
        row = head_dim + SCALE_BYTES if dtype is torch.int8 else head_dim
        return cls((layers, 2, kv_heads, page_size, row), dtype)

    @property
    def block_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def is_quantized(cache: Tensor) -> bool:
    return cache.dtype is torch.int8


def split(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Views of int8 blocks [..., token, dim + 2]: codes [..., token, dim] and scales, bf16 [..., token]."""
    page, dim = blocks.shape[-2], blocks.shape[-1] - SCALE_BYTES
    planes = blocks.flatten(-2)
    assert planes.data_ptr() == blocks.data_ptr(), "the last two dimensions lie together"
    codes = planes[..., : page * dim].view(*planes.shape[:-1], page, dim)
    return codes, planes[..., page * dim :].view(torch.bfloat16)


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """[..., dim] → codes, int8, and scales, bf16 [...]: of each row the largest magnitude / 127, rounded; NaN where a
    number is not finite."""
    exact = values.float()
    most = exact.new_full((), MOST)  # a division by a Python number multiplies by its inverse on CUDA
    scales = (exact.abs().amax(-1) / most).to(torch.bfloat16)
    scales = torch.where(scales.isfinite(), scales, math.nan)
    wide = scales.float()[..., None]
    factors = torch.where(wide > 0, 1.0 / wide, 0.0)
    return (exact * factors).round_().clamp_(-MOST, MOST).to(torch.int8), scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """codes [..., dim], scales [...] → values [..., dim] in `dtype`."""
    return (codes.float() * scales.float()[..., None]).to(dtype)


def write(blocks: Tensor, token: int, numbers: Tensor) -> None:
    """Write numbers [..., tokens, dim] into int8 blocks [..., token, row], beginning at `token`."""
    codes, scales = split(blocks)
    own = slice(token, token + numbers.shape[-2])
    codes[..., own, :], scales[..., own] = quantize(numbers)


def write_part(blocks: Tensor, numbers: Tensor, ids: Tensor, offset: int) -> None:
    """Write a part's numbers, flat in the order of the wire, into int8 blocks [block, layer, K|V, head, token, row],
    beginning at token `offset` of block ids[0]. Block by block, so that temporaries stay in the CPU's
    cache."""
    _, layers, _, heads, page, row = blocks.shape
    codes, scales = split(blocks)
    shape = (1, layers, 2, heads, -1, row - SCALE_BYTES)
    for one in ids[:, None]:
        count = min(page - offset, numbers.numel() // (layers * 2 * heads * shape[-1]))
        size = layers * 2 * heads * count * shape[-1]
        own, numbers = numbers[:size], numbers[size:]
        for plane, rounded in zip(
            (codes[..., offset : offset + count, :], scales[..., offset : offset + count]),
            quantize(own.view(shape)),
            strict=True,
        ):
            plane.index_copy_(0, one, rounded)
        offset = 0


def read(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks [..., token, row] in `dtype`; without a copy where they are not quantised."""
    return dequantize(*split(blocks), dtype) if is_quantized(blocks) else blocks
