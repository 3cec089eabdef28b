"""The partial sums of a part (sum64.py) in one launch. Importing this module needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 2048  # that one program adds in one step
WARPS = 8
# Named, because the default differs between versions of Triton, and some warn of that.
OPTIONS = {"enable_fp_fusion": True}


@triton.jit(do_not_specialize=["count"])
def sum_words(words, sums, count, step: tl.constexpr):
    """Program p of P sums the words of steps p, p + P, …; `sums` [P, 2] int64, `words` [count] int32."""
    program = tl.program_id(0)
    total = tl.zeros([step], tl.int64)
    weighted = tl.zeros([step], tl.int64)
    for first in range(program * step, count, tl.num_programs(0) * step):
        at = first + tl.arange(0, step)
        word = tl.load(words + at, mask=at < count, other=0).to(tl.int64)
        total += word
        weighted += word * (at.to(tl.int64) + 1)
    tl.store(sums + 2 * program, tl.sum(total, axis=0))
    tl.store(sums + 2 * program + 1, tl.sum(weighted, axis=0))


def kernel_sums(words: Tensor, sums: Tensor) -> None:
    """A `Sum` (sum64.py)."""
    sum_words[(sums.numel() // 2,)](words, sums, words.numel(), step=WORDS, num_warps=WARPS, **OPTIONS)
