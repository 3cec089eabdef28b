"""The digest `sum64` (layout/digest.py) in two halves, so that the host does not wait for the device.

The device computes partial sums, the host adds them up. A Triton kernel computes them where Triton is installed, else
torch's operations, which need twice the part's bytes of further memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)
PARTIAL_SUMS = 256  # pairs: the sum of some words, and that of each word times its index from 1
SUMS = 2 * PARTIAL_SUMS
WIDEST = 1024  # columns of the table that torch's operations sum
Sum = Callable[[Tensor, Tensor], None]
"""(words int32 [n], sums int64 [SUMS]): fill `sums` with partial sums, in any order of the words."""


def torch_sums(words: Tensor, sums: Tensor) -> None:
    """A `Sum` by torch. In a table a word's index is row · columns + column, so row and column sums give the weighted sum
    without a product as large as the part."""
    count = words.numel()
    columns = min(WIDEST, count & -count) if count else 1
    table = words.view(-1, columns).to(torch.int64)
    rows, inside = table.sum(1), table.sum(0)
    sums.zero_()
    torch.sum(rows, 0, out=sums[0])
    by_row = torch.arange(rows.numel(), device=words.device).mul_(rows).sum(0).mul_(columns)
    by_column = torch.arange(1, columns + 1, device=words.device).mul_(inside).sum(0)
    torch.add(by_row, by_column, out=sums[1])


def sum64(sums: Tensor) -> bytes:
    """The digest, 16 bytes. `sums`: int64 [SUMS] in main memory."""
    total, weighted = (int(one) for one in sums.view(-1, 2).numpy().sum(0))
    return (total % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little")


def kernel() -> Sum | None:
    """The Triton kernel, or None where Triton is not installed."""
    try:
        from kv_transfer.device.sum64_kernel import kernel_sums
    except ImportError as error:
        log.warning("digests are summed by torch, which takes more memory: %s", error)
        return None
    return kernel_sums
