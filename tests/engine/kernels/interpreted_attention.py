"""The attention kernels against plain products. Run by test_interpreted.py, where Triton interprets kernels."""

from __future__ import annotations

import math
from dataclasses import replace as replaced
from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from cluster.protocol.kv_format import SCALE_BYTES
from engine import kv_blocks
from engine.attention import triton_backend
from engine.attention.base import AttentionShape
from engine.attention.sdpa import SdpaBackend
from engine.attention.triton_backend import SPLIT, TritonBackend
from engine.ops.team import Team
from engine.plan import PlanItem, StepPlan
from engine.step_buffers import Padding, StepBuffers
from engine.step_delta import StepDelta
from tests.engine.steps import buffers_of

LAYERS = 2
Span = tuple[int, int]  # positions
# A fresh prompt, chunks that begin and end anywhere, tokens at both sides of a page's border
MIXED: list[Span] = [(0, 37), (15, 16), (16, 17), (30, 48), (40, 41), (31, 33), (0, 1)]


class Case:
    """Items in blocks that lie anywhere; what no sequence has of the cache is NaN, in int8 its scales."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        page: int,
        spans: list[Span],
        *,
        window: int = 0,
        dtype=torch.float32,
        scale: float | None = None,
        cap: float = 0.0,
        sinks: bool = False,
        int8: bool = False,
    ):
        query_heads, kv_heads, dim = heads
        self.shape = AttentionShape(query_heads, kv_heads, dim, page, (0, window), scale, cap)
        torch.manual_seed(0)
        if sinks:  # from sinks of no weight to sinks that take all of it
            of_heads = (
                torch.linspace(-150, 150, LAYERS * query_heads).view(query_heads, LAYERS).t().contiguous()
            )
            self.shape = replaced(self.shape, sinks=of_heads / 10)
        blocks = torch.randperm(sum(-(-end // page) for _, end in spans) + 3).tolist()
        self.cache = torch.full((len(blocks), LAYERS, 2, kv_heads, page, dim), math.nan, dtype=dtype)
        self.values = self.cache  # as they are read
        self.items: list[PlanItem] = []
        for row, (begin, end) in enumerate(spans):
            own = [blocks.pop() for _ in range(-(-end // page))]
            for at in range(end):
                self.cache[own[at // page], :, :, :, at % page] = torch.randn(LAYERS, 2, kv_heads, dim).to(
                    dtype
                )
            self.items.append(PlanItem(str(row), [0] * (end - begin), begin, own, row, 1))
        if int8:
            self.shape = replaced(self.shape, dtype=dtype)
            rows = self.cache
            self.cache = torch.zeros(*rows.shape[:-1], dim + SCALE_BYTES, dtype=torch.int8)
            kv_blocks.write(self.cache, 0, rows)
            self.values = kv_blocks.read(self.cache, torch.float32)
        tokens = sum(end - begin for begin, end in spans)
        # As in the model, parts of one row
        self.q = torch.randn(tokens, query_heads + 2 * kv_heads, dim).to(dtype)[:, :query_heads]

    def given(self, item: int) -> Tensor:
        """The item's queries."""
        first = sum(len(one.token_ids) for one in self.items[:item])
        return self.q[first : first + len(self.items[item].token_ids)]

    def by_triton(self, layer: int, items: list[PlanItem], q: Tensor) -> Tensor:
        backend = TritonBackend(self.shape, self.cache)
        backend.begin(buffers_of(items, self.shape.page_size))
        out = backend.attend(layer, q, q, q)
        assert not backend._arrived.any(), "the next layer counts from 0"
        return out

    def by_products(self, layer: int) -> Tensor:
        """In fp32, from the same numbers."""
        clean = SdpaBackend(replaced(self.shape, dtype=None), self.values.float(), Team(1))
        clean.begin(buffers_of(self.items, self.shape.page_size))
        keys = [
            torch.stack([self.values[item.block_ids[at // p], layer, which, :, at % p] for item in self.items
                         for at in range(item.begin, item.end)]).float()
            for p in (self.shape.page_size,) for which in (0, 1)
        ]  # fmt: skip
        return clean.attend(layer, self.q.float(), *keys)

    def check(self, layer: int, error: float = 1e-5) -> Tensor:
        got = self.by_triton(layer, self.items, self.q)
        assert got.dtype is self.q.dtype
        torch.testing.assert_close(got.float(), self.by_products(layer), atol=error, rtol=error)
        return got


@pytest.mark.parametrize(
    ("heads", "page", "window", "dtype"),
    [
        ((4, 2, 64), 16, 0, torch.float32),
        ((4, 2, 64), 16, 12, torch.bfloat16),
        ((3, 3, 32), 32, 12, torch.float32),
        ((4, 1, 128), 256, 0, torch.bfloat16),
        ((5, 1, 128), 16, 7, torch.float32),
        ((7, 1, 40), 16, 0, torch.bfloat16),
        ((2, 1, 8), 4, 3, torch.float32),
        ((34, 2, 16), 16, 1, torch.bfloat16),
        ((2, 2, 256), 16, 20, torch.bfloat16),
    ],
    ids=str,
)
def test_a_mixed_step_is_that_of_plain_products(heads, page, window, dtype):
    case = Case(heads, page, MIXED, window=window, dtype=dtype)
    case.check(1, 1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("heads", "page", "window", "dtype", "sinks"),
    [
        ((4, 2, 64), 16, 0, torch.float32, False),
        ((4, 1, 128), 256, 12, torch.bfloat16, False),
        ((7, 1, 40), 8, 0, torch.bfloat16, True),
        ((2, 1, 16), 256, 7, torch.float32, False),
    ],
    ids=str,
)
def test_codes_are_read_as_the_values_they_stand_for(heads, page, window, dtype, sinks):
    spans = [*MIXED, (SPLIT + 20, SPLIT + 21)]
    case = Case(heads, page, spans, window=window, dtype=dtype, sinks=sinks, cap=1.5 * sinks, int8=True)
    case.check(1, 1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("window", "dtype"), [(0, torch.float32), (12, torch.float32), (12, torch.bfloat16)], ids=str
)
def test_scores_are_scaled_and_capped(window, dtype):
    case = Case((4, 2, 32), 16, MIXED, window=window, dtype=dtype, scale=0.5, cap=1.5)
    got = case.check(1, 1e-5 if dtype is torch.float32 else 2e-2)
    case.shape = replaced(case.shape, cap=0.0)
    assert not torch.allclose(got, case.by_triton(1, case.items, case.q), atol=0.05)


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        ((3, 3, 64), 12, torch.float32),
        ((8, 1, 64), 0, torch.bfloat16),
    ],
    ids=str,
)
def test_sinks_take_part_in_the_sums(heads, window, dtype):
    """In prompts and tokens; the last one of each head is larger than any score."""
    case = Case(heads, 16, MIXED, window=window, dtype=dtype, sinks=True)
    got = case.check(1, 1e-5 if dtype is torch.float32 else 2e-2)
    case.shape = replaced(case.shape, sinks=None)
    assert not torch.allclose(got, case.by_triton(1, case.items, case.q), atol=0.05)


def test_a_sink_that_is_larger_than_scores_by_far_leaves_nothing():
    """An unbounded power of two would be infinite."""
    case = Case((4, 2, 32), 16, [(0, 5), (40, 41)])
    case.shape = replaced(case.shape, sinks=torch.full((LAYERS, 4), 300.0))
    assert case.check(1).abs().max() < 1e-30


def test_a_cap_bounds_scores_however_large():
    """Without an overflow: the powers of two behind it are infinite or 0."""
    case = Case((4, 2, 32), 16, MIXED, scale=1e4, cap=1.5)
    assert case.check(1).isfinite().all()


def test_layers_of_both_kinds_read_their_own_keys():
    case = Case((4, 2, 32), 16, MIXED, window=5)
    assert not torch.equal(case.check(0), case.check(1))


# Lengths at which keys have one split, a second one of one key, all splits, and splits that are longer than the least
LONG: list[Span] = [(end - 1, end) for end in (1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 8 * SPLIT, 8 * SPLIT + 1)]


@pytest.mark.parametrize("window", [0, SPLIT + 3])
def test_splits_of_long_sequences_are_merged(window, monkeypatch):
    """To the same bits, whether each split of a sequence has its own program, or a few programs compute them in turn."""
    monkeypatch.setattr(triton_backend, "PROGRAMS", 8)
    assert triton_backend.most_splits(1) == 8
    case = Case((2, 1, 16), 256, LONG, window=window, sinks=window > 0)
    case.check(1)
    each = case.by_triton(1, case.items, case.q)
    monkeypatch.setattr(triton_backend, "STEP_PROGRAMS", 3 * len(LONG))
    assert torch.equal(case.by_triton(1, case.items, case.q), each)


def test_a_sequence_gets_the_same_whatever_the_batch():
    """To the last bit: alone, among others that are longer, and recorded for the longest context."""
    case = Case((4, 2, 32), 16, [*MIXED, (300, 301), (1100, 1101), (260, 290)])
    whole = case.by_triton(0, case.items, case.q)
    first = 0
    for index, item in enumerate(case.items):
        count = len(item.token_ids)
        alone = case.by_triton(0, [replace(item, row=0)], case.given(index))
        assert torch.equal(alone, whole[first : first + count]), item
        first += count


def test_chunks_give_what_the_whole_prompt_gives():
    """To the last bit, wherever it is cut."""
    case = Case((4, 2, 32), 16, [(0, 90)], window=25)
    (item,) = case.items
    for layer in range(LAYERS):
        whole = case.by_triton(layer, case.items, case.q)
        cut = [
            case.by_triton(layer, [replace(item, token_ids=[0] * (b - a), begin=a)], case.q[a:b])
            for a, b in pairwise((0, 1, 33, 50, 90))
        ]
        torch.testing.assert_close(torch.cat(cut), whole, atol=1e-6, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, of padding
@pytest.mark.parametrize("each", [1, 3])
def test_padding_changes_nothing(each):
    """As engine/graphs pads and bounds steps: rows of the null block, in which all is NaN but what padding wrote."""
    spans = [(end - each, end) for end in (20, 33, 5)]
    case = Case((4, 2, 32), 16, spans)
    plain = case.by_triton(0, case.items, case.q)
    null = case.cache.shape[0] - 1
    case.cache[null] = math.nan
    buffers = StepBuffers(3, 40, 3 * each, 16, torch.device("cpu"), padding=Padding(8, 8 * each, null))
    assert all(null not in item.block_ids for item in case.items)
    buffers.load(StepDelta.of(StepPlan(case.items, [])).padded(5, each, buffers.null_row))
    buffers.bound_lengths()
    backend = TritonBackend(case.shape, case.cache)
    backend.begin(buffers)
    q = torch.cat([case.q, torch.full((5 * each, 4, 32), math.nan)])
    assert torch.equal(backend.attend(0, q, q, q)[: 3 * each], plain)
