"""Stale contents of a freed block, NaN and infinities included, never reach another request's output: attention reads
nothing beyond a sequence's own length, for every backend, kernel and dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.attention.sdpa import SdpaBackend
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.plan import PlanItem
from engine.request import EngineRequest, SamplingParams
from tests.engine.ranks import engine_of, make_engine, run, runners
from tests.engine.steps import buffers_of
from tests.harness.checkpoints import prompt_ids
from tests.harness.exactness import assert_greedy

PAGE, LAYERS, BLOCKS = 16, 2, 64
LEFT = [math.nan, math.inf, -math.inf]
# (tokens before the step, tokens of the step): single tokens at every place in a block, chunks, fresh prompts
SPANS = [
    *((end - 1, 1) for end in range(1, 2 * PAGE + 2)),
    (30, 9),
    (16, 40),
    (3, 70),
    (0, 5),
    (0, 21),
    (0, 60),
]


def make(name: str, threads: int, shape: AttentionShape, cache: Tensor) -> AttentionBackend:
    if name == "sdpa":
        return SdpaBackend(shape, cache, Team(threads))
    return PagedCpuBackend(shape, cache, KernelTeam(threads, cache.dtype, shape.head_dim))


def step(
    heads: int, kv: int, dim: int, dtype: torch.dtype, window: int
) -> tuple[list[PlanItem], Tensor, Tensor, Tensor, Tensor]:
    """Items in blocks of their own, and a cache in which the rest of their last blocks is zero."""
    torch.manual_seed(0)
    items, free = [], list(torch.randperm(200).tolist())
    for number, (begin, count) in enumerate(SPANS):
        blocks = [free.pop() for _ in range(-(-(begin + count) // PAGE))]
        items.append(PlanItem(str(number), [5] * count, begin, blocks, number, 1))
    cache = torch.zeros(200, LAYERS, 2, kv, PAGE, dim, dtype=dtype)
    tokens = sum(len(item.token_ids) for item in items)
    q, k, v = (torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv, kv))
    row = 0
    for item in items:
        own = torch.randn(item.end, LAYERS, 2, kv, dim).to(dtype)
        mine = slice(row, row + len(item.token_ids))
        own[item.begin :, :, 0], own[item.begin :, :, 1] = k[mine, None], v[mine, None]
        for first in range(0, item.end, PAGE):
            some = own[first : first + PAGE]
            cache[item.block_ids[first // PAGE], ..., : len(some), :] = some.permute(1, 2, 3, 0, 4)
        row = mine.stop
    return items, cache, q, k, v


def poisoned(cache: Tensor, items: list[PlanItem], value: float) -> Tensor:
    """All of it but what the items' own tokens have written."""
    result = torch.full_like(cache, value)
    for item in items:
        for first in range(0, item.end, PAGE):
            own = (item.block_ids[first // PAGE], ..., slice(min(PAGE, item.end - first)), slice(None))
            result[own] = cache[own]
    return result


@pytest.mark.parametrize("window", [0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "threads"),
    [
        (4, 2, 32, 1),
        (3, 3, 32, 2),
        # The kernels compile for each width: ten seconds for each dtype.
        pytest.param(4, 2, 64, 1, marks=pytest.mark.long),
        pytest.param(6, 2, 40, 1, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
def test_attention_reads_nothing_beyond_the_length(backend, heads, kv, dim, dtype, window, threads):
    items, cache, q, k, v = step(heads, kv, dim, dtype, window)
    shape = AttentionShape(heads, kv, dim, PAGE, (window,) * LAYERS)

    def outputs(kept: Tensor) -> Tensor:
        attention = make(backend, threads, shape, kept)
        attention.begin(buffers_of(items, PAGE))
        return torch.stack([attention.attend(layer, q, k, v).clone() for layer in range(LAYERS)])

    clean = outputs(cache)
    assert bool(clean.isfinite().all())
    for value in LEFT:
        # Not bit for bit: the same step computed twice, also over the same cache, can differ in the last bits.
        rtol, atol = (1e-5, 1e-6) if dtype is torch.float32 else (1e-2, 1e-2)
        torch.testing.assert_close(outputs(poisoned(cache, items, value)), clean, rtol=rtol, atol=atol)
    # One backend, two steps: buffers that are used again hold nothing of the first.
    attention = make(backend, threads, shape, poisoned(cache, items, math.nan))
    for some in (items, items[::-1][:1], items[:3]):
        attention.begin(buffers_of(some, PAGE))
        rows = [row for item in some for row in rows_of(item, items)]
        got = attention.attend(0, q[rows].contiguous(), k[rows].contiguous(), v[rows].contiguous())
        torch.testing.assert_close(got, clean[0][rows])


def rows_of(wanted: PlanItem, items: list[PlanItem]) -> range:
    first = 0
    for item in items:
        if item is wanted:
            break
        first += len(item.token_ids)
    return range(first, first + len(wanted.token_ids))


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("backend", ["sdpa", "cpu"])
@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_an_engine_gives_the_same_output_over_poisoned_blocks(variant, backend, value, checkpoint):
    model = checkpoint(variant)
    engine = make_engine(model, blocks=80, attention_backend=backend, max_batch_tokens=32)
    prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 9, 33, 16, 1))}
    requests = [EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()]
    runner: Any = engine._runner
    runner.kv_cache[:80] = value
    outputs = run(engine, *requests)
    for name, prompt in prompts.items():
        assert_greedy(f"poisoned blocks, {backend}", model, prompt, outputs.tokens[name, 0])


def test_two_ranks_give_the_same_output_over_poisoned_blocks(checkpoint):
    model = checkpoint("llama")
    with runners(model, 2) as ranks:
        for rank in ranks:
            rank.kv_cache[:80] = math.nan
        prompts = {str(i): prompt_ids(length, seed=i) for i, length in enumerate((70, 9))}
        requests = [EngineRequest(name, prompt, GREEDY) for name, prompt in prompts.items()]
        outputs = run(engine_of(ranks[0]), *requests)
    for name, prompt in prompts.items():
        assert_greedy("poisoned blocks, two ranks", model, prompt, outputs.tokens[name, 0])
