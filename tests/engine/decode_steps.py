"""Decode steps of a model by its lists of jobs, and operation by operation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.cpu.products import int8
from engine.plan import PlanItem, StepPlan
from engine.runner import ModelRunner

PAGE, BLOCKS = 16, 96
needs_int8 = pytest.mark.skipif(not int8.supported(), reason="this CPU has no AVX512-VNNI")
NO_LIST = (
    "olmo2",
    "olmo2-biases-mqa",
)  # norms of whole rows, and a stream that is read without one: not as jobs


def tokens_after(lengths: list[int]) -> list[PlanItem]:
    """One token for each sequence, behind so many others; blocks lie anywhere."""
    free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    items = []
    for row, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(length // PAGE + 1)]
        items.append(PlanItem(str(row), [7 + row], length, blocks, row, 1))
    return items


def filled(runner: ModelRunner, items: list[PlanItem], stale: float) -> None:
    """The sequences' own keys and values; all else is `stale`."""
    source = torch.Generator().manual_seed(2)
    cache = runner.kv_cache
    cache.fill_(stale)
    for item in items:
        for first in range(0, item.begin, PAGE):
            own = cache[item.block_ids[first // PAGE], ..., : min(PAGE, item.begin - first), :]
            own.copy_(torch.randn(own.shape, generator=source))


def one_by_one(runner: ModelRunner, plan: StepPlan) -> Tensor:
    jobs, runner._decode_jobs = runner._decode_jobs, None
    try:
        return runner.execute(plan)
    finally:
        runner._decode_jobs = jobs
