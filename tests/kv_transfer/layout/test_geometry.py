"""Parts of any shape, between any two degrees, put the same bytes into other blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol.kv_heads import head_range
from kv_transfer.layout.digest import SUM64, XXH3_128, digest
from kv_transfer.layout.geometry import gather, plan_flows, scatter
from kv_transfer.layout.rows import CacheRegion

LAYERS, DIM, PAGE = 3, 4, 4


@settings(max_examples=80, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4]),
    source_tp=st.sampled_from([1, 2, 4]),
    target_tp=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 30),
    held=st.integers(0, 7),
    cut=st.integers(1, 9),
    seed=st.integers(0, 2**32),
)
@pytest.mark.parametrize("plain", [True, False], ids=["rows", "strided"])
def test_every_head_of_every_rank_arrives_once(plain, heads, source_tp, target_tp, tokens, held, cut, seed):
    """Over numpy's rows, and over torch's strided copies: what is not plainly in main memory takes those."""
    torch.manual_seed(seed % 1000)
    whole = torch.randn(tokens, LAYERS, 2, heads, DIM)
    blocks = -(-tokens // PAGE)
    held = min(held * PAGE, tokens // PAGE * PAGE)
    source_ids, target_ids = (
        torch.randperm(blocks + 3)[:blocks].tolist(),
        torch.randperm(blocks + 5)[:blocks].tolist(),
    )
    sources = [_cache(whole, source_ids, head_range(r, source_tp, heads)) for r in range(source_tp)]
    ranges = [head_range(r, target_tp, heads) for r in range(target_tp)]
    targets = [_cache(whole[:held], target_ids, r) for r in ranges]
    if not plain:
        sources, targets = [_spread(c) for c in sources], [_spread(c) for c in targets]
    for flow in plan_flows(heads, source_tp, target_tp, seed.to_bytes(16, "little")):
        first = head_range(flow.source_rank, source_tp, heads)[0]
        base = ranges[flow.target_rank][0]
        for begin in range(held, tokens, cut):
            end = min(tokens, begin + cut)
            part = torch.empty((end - begin) * LAYERS * 2 * (flow.head_end - flow.head_begin) * DIM)
            used = slice(begin // PAGE, -(-end // PAGE))
            span = range(begin, end)
            source_heads = range(flow.head_begin - first, flow.head_end - first)
            gather(
                sources[flow.source_rank],
                part,
                CacheRegion(range(LAYERS), source_heads, span, source_ids[used]),
            )
            target_heads = range(flow.head_begin - base, flow.head_end - base)
            scatter(
                targets[flow.target_rank],
                part,
                CacheRegion(range(LAYERS), target_heads, span, target_ids[used]),
            )
    for target, own in zip(targets, ranges, strict=True):
        assert torch.equal(target, _cache(whole, target_ids, own))


def _cache(tokens: torch.Tensor, blocks: list[int], heads: tuple[int, int]) -> torch.Tensor:
    """[block, layer, K|V, head, token, dim] with the tokens in their blocks, zeros elsewhere."""
    cache = torch.zeros(40, LAYERS, 2, heads[1] - heads[0], PAGE, DIM)
    for index, token in enumerate(tokens):
        cache[blocks[index // PAGE], :, :, :, index % PAGE] = token[:, :, heads[0] : heads[1]]
    return cache


def _spread(cache: torch.Tensor) -> torch.Tensor:
    """The same numbers, not contiguous."""
    return torch.stack((cache, cache), -1)[..., 0]


@given(size=st.integers(1, 200), at=st.integers(0, 199), kind=st.sampled_from([XXH3_128, SUM64]))
def test_a_flipped_bit_changes_the_digest(size, at, kind):
    data = torch.arange(size, dtype=torch.uint8)
    before = digest([data], kind)
    data[at % size] ^= 1
    assert digest([data], kind) != before
