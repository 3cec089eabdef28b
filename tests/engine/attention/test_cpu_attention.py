"""The CPU backend's attention: as exact as bf16 is, and the same on any number of threads."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.attention.sdpa import SdpaBackend
from engine.ops.cpu.attention import wide_prompts
from engine.ops.cpu.products import bf16
from engine.ops.cpu.team import KernelTeam
from engine.ops.team import Team
from engine.plan import PlanItem
from tests.engine.attention.attention_steps import DIM, HEADS, KV, LAYERS, PAGE, step
from tests.engine.steps import buffers_of

# As large as the largest scores, smaller than all, larger by far, and without any weight
SINKS = torch.tensor([[0.0] * HEADS, [2.5, -60.0, 40.0, -math.inf]])


@pytest.mark.parametrize(("cap", "sinks"), [(1.5, None), (0.0, SINKS), (1.5, SINKS)], ids=str)
@pytest.mark.parametrize("window", [0, 12])
def test_scores_are_scaled_and_capped_beside_sinks(window, cap, sinks):
    """Most scores are several times the cap; single tokens and prompts, by products and by kernels."""
    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (window,) * LAYERS, scale=0.9, cap=cap, sinks=sinks)
    backends: list[AttentionBackend] = [
        SdpaBackend(shape, cache, Team(1)),
        PagedCpuBackend(shape, cache, KernelTeam(1, torch.float32, DIM)),
        PagedCpuBackend(shape, cache, KernelTeam(2, torch.float32, DIM)),
    ]
    expected, row = torch.empty_like(q), 0
    for item in items:
        keys, values = (
            cache[item.block_ids, 1, which].transpose(1, 2).flatten(0, 1)[: item.end] for which in (0, 1)
        )
        for at in range(item.begin, item.end):
            low = max(0, at + 1 - window) if window else 0
            for head in range(HEADS):
                mine = head // (HEADS // KV)
                scores = keys[low : at + 1, mine] @ q[row, head] * 0.9
                scores = cap * torch.tanh(scores / cap) if cap else scores
                expected[row, head] = with_sink(scores, sinks, head) @ values[low : at + 1, mine]
            row += 1
    for backend in backends:
        backend.begin(buffers_of(items, PAGE))
        torch.testing.assert_close(backend.attend(1, q, k, v).view(q.shape), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("cap", [0.0, 1.5])
def test_no_softmax_hides_a_nan(cap):
    """Of a key, whose value is finite: all later queries of its heads see it, and no others."""
    cache, items, q, k, v = step()
    shape = AttentionShape(HEADS, KV, DIM, PAGE, (0,) * LAYERS, cap=cap)
    first = 0  # row of the item
    for item in items:
        for at in (0, item.end - 1):
            damaged, own = cache.clone(), k.clone()
            damaged[item.block_ids[at // PAGE], 1, 0, 1, at % PAGE, 3] = math.nan
            row = first + max(0, at - item.begin)
            if at >= item.begin:
                own[row, 1, 3] = math.nan
            backend = PagedCpuBackend(shape, damaged, KernelTeam(1, torch.float32, DIM))
            backend.begin(buffers_of(items, PAGE))
            found = backend.attend(1, q, own, v).view(q.shape).isnan()
            expected = torch.zeros_like(found)
            expected[row : first + len(item.token_ids), HEADS // 2 :] = True
            assert torch.equal(found, expected), (item.request_id, at)
        first += len(item.token_ids)


def with_sink(scores: Tensor, sinks: Tensor | None, head: int) -> Tensor:
    """The weights of the scores beside the sink of layer 1 and this head."""
    if sinks is None:
        return torch.softmax(scores, 0)
    return torch.softmax(torch.cat((scores, sinks[1, head : head + 1].to(scores.dtype))), 0)[:-1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [0, 25])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "cap", "sinks"),
    [
        (4, 2, 64, 0.0, None),
        (4, 2, 64, 0.0, SINKS),
        (4, 2, 64, 1.5, SINKS),
        (3, 3, 32, 0.0, None),
        (4, 1, 128, 0.0, None),
        (2, 1, 40, 0.0, SINKS[:, :2].contiguous()),
    ],
    ids=str,
)
def test_prompts_in_bf16_are_as_exact_as_bf16_is(heads, kv, dim, cap, sinks, window, threads):
    """Fresh ones, later chunks, short ones, and what does not fill a panel; the last shape is not the kernel's, nor are
    capped scores."""
    torch.manual_seed(0)
    cache = torch.randn(40, LAYERS, 2, kv, PAGE, dim).bfloat16()
    items = [
        PlanItem("fresh", list(range(77)), 0, [3, 7, 12, 13, 14], 0, 1),
        PlanItem("chunk", list(range(70)), 30, [1, 2, 9, 4, 20, 21, 22], 1, 1),
        PlanItem("short", list(range(5)), 60, [30, 31, 32, 33, 34], 2, 1),
        PlanItem("tile", list(range(12)), 0, [5], 3, 1),
    ]
    tokens = sum(len(item.token_ids) for item in items)
    qkv = torch.randn(tokens, heads + 2 * kv, dim).bfloat16()  # as in the model: parts of one row
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv], qkv[:, heads + kv :]
    row = 0
    for item in items:
        for position in range(item.begin, item.end):
            layer = cache[item.block_ids[position // PAGE], 1]
            layer[0, :, position % PAGE], layer[1, :, position % PAGE] = k[row], v[row]
            row += 1
    backend = PagedCpuBackend(
        AttentionShape(heads, kv, dim, PAGE, (0, window), cap=cap, sinks=sinks),
        cache,
        KernelTeam(threads, torch.bfloat16, dim),
    )
    backend.begin(buffers_of(items, PAGE))
    mixed = backend.attend(1, q, k, v).view(tokens, heads, dim).double()
    row = 0
    for item in items:
        keys, values = (
            cache[item.block_ids, 1, which].transpose(1, 2).flatten(0, 1)[: item.end].double()
            for which in (0, 1)
        )
        for at in range(item.begin, item.end):
            low = max(0, at + 1 - window) if window else 0
            for head in range(heads):
                mine = head // (heads // kv)
                scores = keys[low : at + 1, mine] @ q[row, head].double() * dim**-0.5
                scores = cap * torch.tanh(scores / cap) if cap else scores
                expected = with_sink(scores, sinks, head) @ values[low : at + 1, mine]
                assert torch.allclose(mixed[row, head], expected, atol=0.02, rtol=0.02), (item.request_id, at)
            row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 25])
def test_single_tokens_are_the_same_on_any_number_of_threads(window, dtype):
    """Threads take the KV heads of a sequence from each other; what a head gives does not depend on it."""
    heads, kv, dim = 6, 3, 16
    torch.manual_seed(0)
    cache = torch.randn(40, LAYERS, 2, kv, PAGE, dim).to(dtype)
    ends = [1, 70, 16, 33]
    items = [
        PlanItem(str(row), [5], end - 1, torch.randperm(40)[: -(-end // PAGE)].tolist(), row, 1)
        for row, end in enumerate(ends)
    ]
    q, k, v = (torch.randn(len(items), n, dim).to(dtype) for n in (heads, kv, kv))
    found, sinks = [], torch.randn(LAYERS, heads) if window else None
    for threads in (1, 2, 3):
        shape = AttentionShape(heads, kv, dim, PAGE, (window,) * LAYERS, sinks=sinks)
        backend = PagedCpuBackend(shape, cache, KernelTeam(threads, dtype, dim))
        backend.begin(buffers_of(items, PAGE))
        found.append([backend.attend(layer, q, k, v) for layer in range(LAYERS)])
        alone = []
        for row, item in enumerate(items):
            backend.begin(buffers_of([item], PAGE))
            alone.append(backend.attend(0, q[row : row + 1], k, v))
        assert torch.equal(torch.cat(alone), found[-1][0])
    for some in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(some, found[0], strict=True))


EACH_KERNEL = """
import torch
from engine.attention.base import AttentionShape
from engine.attention.paged_cpu import PagedCpuBackend
from engine.ops.cpu.team import KernelTeam
from engine.plan import PlanItem
from tests.engine.steps import buffers_of

tokens, dim, dtype = 3000, 32, torch.{dtype}
blocks = list(range(tokens // 16 + 2))
cache = torch.zeros(len(blocks), 1, 2, 1, 16, dim, dtype=dtype)
backend = PagedCpuBackend(AttentionShape(1, 1, dim, 16, (0,)), cache, KernelTeam(2, dtype, dim))
for item in (PlanItem("prompt", list(range(tokens)), 0, blocks, 0, 1), PlanItem("token", [1], tokens, blocks, 0, 1)):
    backend.begin(buffers_of([item], 16))
    q, k, v = (torch.randn(len(item.token_ids), 1, dim, dtype=dtype) for _ in range(3))
    assert not backend.attend(0, q, k, v).isnan().any()
print("whole")
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_kernels_use_no_memory_that_is_freed(dtype):
    """Every allocation is a mapping of its own here: memory that was freed can't be read without a fault."""
    script = EACH_KERNEL.format(dtype=dtype)
    limits = {"MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": "1000000"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **limits},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-500:])
    assert ran.stdout == b"whole\n"


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("window", "dtype", "dim"), [(0, torch.float32, 8), (300, torch.bfloat16, 40)])
def test_prompts_in_fp32_are_the_same_in_any_chunks(window, dtype, dim, threads, monkeypatch):
    """To the last bit, on any number of threads; what lies behind a sequence's end or before its window is not read."""
    monkeypatch.setattr(bf16, "has_instruction", lambda: dtype is torch.float32)
    heads, kv, tokens = 6, 2, 777
    torch.manual_seed(0)
    blocks = torch.randperm(60)[: -(-tokens // PAGE)].tolist()
    q, k, v = (torch.randn(tokens, n, dim).to(dtype) for n in (heads, kv, kv))
    cache = torch.full((60, LAYERS, 2, kv, PAGE, dim), math.nan, dtype=dtype)
    for at in range(tokens):
        own = cache[blocks[at // PAGE], 1, :, :, at % PAGE]
        own[0], own[1] = k[at], v[at]
    sinks = torch.randn(LAYERS, heads)
    shape = AttentionShape(heads, kv, dim, PAGE, (0, window), sinks=sinks)
    backend = PagedCpuBackend(shape, cache, KernelTeam(threads, dtype, dim))

    def attend(begin: int, end: int) -> Tensor:
        backend.begin(buffers_of([PlanItem("r", [1] * (end - begin), begin, blocks, 0, 1)], PAGE))
        return backend.attend(1, q[begin:end], k[begin:end], v[begin:end])

    whole = attend(0, tokens)
    keys, values = (one.double().repeat_interleave(heads // kv, 1).transpose(0, 1) for one in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * dim**-0.5
    to = torch.arange(tokens)
    hidden = (to[None] > to[:, None]) | (to[None] <= to[:, None] - (window or tokens))
    scores = torch.cat(
        (scores.masked_fill(hidden, -math.inf), sinks[1, :, None, None].expand(-1, tokens, 1)), -1
    )
    expected = (torch.softmax(scores, -1)[..., :-1] @ values).transpose(0, 1).reshape(tokens, -1)
    within = 2e-6 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(whole.double(), expected, atol=within, rtol=within)
    for cuts in ((0, 5, 256, 300, 777), (0, 511, 513, 777)):
        assert torch.equal(torch.cat([attend(*pair) for pair in pairwise(cuts)]), whole)
    if window:
        far = blocks[: (700 - window) // PAGE]
        cache[far] = math.nan
        assert torch.equal(attend(700, tokens), whole[700:])


def test_rows_of_prompts_are_parted_for_threads():
    """In parts of at most SPAN rows, and several for a thread where a part is worth widening keys for."""
    of = wide_prompts.spans
    assert [of(rows, 8, 1) for rows in (2, 768, 769, 8192)] == [1, 1, 2, 11]
    assert [of(rows, 1, 4) for rows in (2, 100, 200, 768, 8192)] == [1, 1, 2, 8, 11]
