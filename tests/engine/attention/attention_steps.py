"""Steps for attention over a paged cache, and a reference kernel that reads its arguments literally."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.plan import PlanItem

HEADS, KV, DIM, PAGE, LAYERS = 4, 2, 8, 16, 2


def reference(
    *, q, k, v, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table, softmax_scale, **more
) -> Tensor:
    """Paged causal attention, one query at a time. k, v [block, token, head, dim]."""
    window = more.get("window") or more["window_size"]
    out = torch.empty_like(q)
    for index in range(len(seqused_k)):
        begin, end = int(cu_seqlens_q[index]), int(cu_seqlens_q[index + 1])
        length = int(seqused_k[index])
        assert end - begin <= max_seqlen_q
        assert length <= max_seqlen_k
        keys = k[block_table[index].long()].flatten(0, 1)[:length]
        values = v[block_table[index].long()].flatten(0, 1)[:length]
        for row in range(begin, end):
            at = length - (end - row)
            low = max(0, at - window[0]) if window[0] >= 0 else 0
            high = at + 1 + window[1] if window[1] >= 0 else length
            for head in range(q.shape[1]):
                mine = head // (q.shape[1] // k.shape[2])
                scores = keys[low:high, mine] @ q[row, head] * softmax_scale
                out[row, head] = torch.softmax(scores, 0) @ values[low:high, mine]
    return out


def step() -> tuple[Tensor, list[PlanItem], Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    cache = torch.randn(20, LAYERS, 2, KV, PAGE, DIM)
    items = [
        PlanItem("fresh", list(range(21)), 0, [3, 7], 0, 1),
        PlanItem("chunk", list(range(9)), 30, [1, 2, 9, 4], 1, 1),
        PlanItem("decode", [5], 40, [11, 12, 13], 2, 1),
    ]
    tokens = sum(len(item.token_ids) for item in items)
    q, k, v = torch.randn(tokens, HEADS, DIM), torch.randn(tokens, KV, DIM), torch.randn(tokens, KV, DIM)
    row = 0
    for item in items:
        for position in range(item.begin, item.end):
            block, offset = item.block_ids[position // PAGE], position % PAGE
            cache[block, :, 0, :, offset], cache[block, :, 1, :, offset] = k[row], v[row]
            row += 1
    return cache, items, q, k, v
