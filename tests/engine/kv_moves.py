"""KV that the copiers of workers move between runners."""

from __future__ import annotations

import secrets

import torch
from torch import Tensor

from engine.runner import ModelRunner
from kv_transfer.device.base import REACHED
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.conversion import Conversion
from kv_transfer.layout.digest import NONE
from kv_transfer.layout.geometry import plan_flows
from kv_transfer.layout.rows import CacheRegion
from tests.engine.rank_parts import heads, layers

HEADS, KV, DIM, PAGE, LAYERS, BLOCKS = 6, 2, 16, 16, 2, 12


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def move(
    sources: list[ModelRunner],
    from_blocks,
    targets: list[ModelRunner],
    to_blocks,
    count: int,
    conversion: Conversion | None = None,
) -> int:
    """As in rank_parts, by the copiers of workers; returns the bytes."""
    config, page = sources[0].model_config, sources[0].page_size
    cut, moved = count // 2 // page * page + 3, 0
    for flow in plan_flows(config.num_kv_heads, len(sources), len(targets), secrets.token_bytes(16)):
        source, target = sources[flow.source_rank], targets[flow.target_rank]
        for tokens in (range(cut), range(cut, count)):
            blocks = slice(tokens.start // page, -(-tokens.stop // page))
            numbers = len(tokens) * config.num_layers * 2 * (flow.head_end - flow.head_begin)
            part = torch.empty(numbers * source.kv_cache[0, 0, 0, 0, 0].nbytes, dtype=torch.uint8)
            sent = CacheRegion(layers(source), heads(source, flow), tokens, from_blocks[blocks])
            kept = CacheRegion(layers(target), heads(target, flow), tokens, to_blocks[blocks])
            CpuCopier(source.kv_cache).read(sent, part, NONE, REACHED, to_host=True)
            CpuCopier(target.kv_cache, conversion).scatter(part, kept, REACHED)
            moved += part.nbytes
    return moved
