"""The digest `sum64` (layout/digest.py) as sums that a device computes without its host waiting for them.

The device adds up partial sums, the host the few that are left. By a kernel where Triton is installed, else by
operations of torch, which need twice the part's bytes beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)
PARTIAL_SUMS = 256  # pairs: of the words, and of the words weighted by their index from 1
SUMS = 2 * PARTIAL_SUMS
WIDEST = 1024  # columns of the table that torch's operations sum
Sum = Callable[[Tensor, Tensor], None]
"""(words int32 [n], sums int64 [SUMS]): fill `sums` with partial sums, in any order of the words."""


def torch_sums(words: Tensor, sums: Tensor) -> None:
    """As a table of rows: a word's index is row · columns + column, so that the weighted sum needs no product of the size
    of the words."""
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
    """The digest. `sums`: in main memory."""
    total, weighted = (int(one) for one in sums.view(-1, 2).numpy().sum(0))
    return (total % 2**64).to_bytes(8, "little") + (weighted % 2**64).to_bytes(8, "little")


def kernel() -> Sum | None:
    """Triton's, or None where it is not installed."""
    try:
        from kv_transfer.device.sum64_kernel import kernel_sums
    except ImportError as error:
        log.warning("digests are summed by torch, which takes more memory: %s", error)
        return None
    return kernel_sums
