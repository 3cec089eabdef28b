"""Which rank sends which heads to which rank, and where a part's bytes belong.

A flow is a (source rank, target rank) pair with heads in common. On the wire a part is its blocks one after the
other, each [layer][K|V][head][token][dim] with as many tokens as lie in it, in int8 with their scales after each head's
codes: what is contiguous in a cache stays so, and a block of a whole rank is copied at once (with the layers outermost,
gathering and scattering took half as long again).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.protocol import kv_format
from cluster.protocol.kv_heads import head_range
from kv_transfer.layout.rows import CacheRegion, HostPart


@dataclass(frozen=True)
class Flow:
    source_rank: int
    target_rank: int
    head_begin: int  # of the whole model
    head_end: int


def plan_flows(num_heads: int, source_tp: int, target_tp: int, transfer_id: bytes) -> list[Flow]:
    """Flows that bring every head of every target rank from exactly one source; a replica is chosen by transfer id."""
    pick = int.from_bytes(transfer_id[:4], "little")
    flows: list[Flow] = []
    for target in range(target_tp):
        begin, end = head_range(target, target_tp, num_heads)
        for head in range(begin, end):
            owners = [s for s in range(source_tp) if head in range(*head_range(s, source_tp, num_heads))]
            source = owners[pick % len(owners)]
            last = flows[-1] if flows else None
            if last and last.source_rank == source and last.target_rank == target and last.head_end == head:
                flows[-1] = Flow(source, target, last.head_begin, head + 1)
            else:
                flows.append(Flow(source, target, head, head + 1))
    return flows


def pairs(cache: Tensor, part: Tensor, region: CacheRegion) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of equal shape [block, layer, K|V, head, numbers], one for each plane: (in the cache, in the part)."""
    page, row = cache.shape[4], cache.shape[5]
    layers, heads = region.layers, region.heads
    token = len(layers) * 2 * len(heads) * row
    own = cache.view(*cache.shape[:4], page * row)[:, layers.start : layers.stop, :, heads.start : heads.stop]
    for span in region.spans(page):
        count = span.tokens // span.blocks  # in each of them
        inside = part[span.token * token : (span.token + span.tokens) * token]
        blocks = own[span.block : span.block + span.blocks]
        of_part = inside.view(span.blocks, len(layers), 2, len(heads), count * row)
        for plane in kv_format.planes(row, quantized=cache.dtype is torch.int8):
            first = page * plane.before + span.offset * plane.row
            width = count * plane.row
            yield (
                blocks[..., first : first + width],
                of_part[..., count * plane.before : count * plane.before + width],
            )


def gather(cache: Tensor, part: Tensor, region: CacheRegion) -> None:
    """Cache [block, layer, K|V, head, token, dim] → part (flat, in the order of the wire). Raises IndexError
    for a block that does not exist."""
    if host := HostPart.of(cache, part, region):
        host.gather()
        return
    for inside_cache, inside_part in pairs(cache, part, region):
        inside_part.copy_(inside_cache)


def pieces(cache: Tensor, region: CacheRegion, least_bytes: int) -> list[Tensor] | None:
    """The part without a copy: the cache's own bytes (uint8) in the order of the wire. None if they lie in pieces shorter
    than `least_bytes`, or not in main memory. Raises IndexError for a block that does not exist."""
    host = HostPart.of(cache, cache, region)
    found = host.pieces(least_bytes) if host else None
    if found is None:
        return None
    flat = cache.view(-1).view(torch.uint8)
    return [flat[piece] for piece in found]


def scatter(cache: Tensor, part: Tensor, region: CacheRegion) -> None:
    """The reverse of `gather`."""
    if host := HostPart.of(cache, part, region):
        host.scatter()
        return
    for inside_cache, inside_part in pairs(cache, part, region):
        inside_cache.copy_(inside_part)
