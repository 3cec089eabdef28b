"""Constants and layout shared by both sides of the hand-off benchmark."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.checkpoint import SHAPE, ModelShape
from cluster.config.worker import TransferConfig
from cluster.protocol.wire_version import WIRE_VERSION
from engine.kv_cache import allocate
from wire import common_pb2

PAGE_SIZE = 16
TOKENS = 2048
BLOCKS = TOKENS // PAGE_SIZE
RAW_BYTES = 64 << 20
CONFIG = TransferConfig(transport="nixl")


def kv_cache(blocks: int) -> Tensor:
    """An engine's: [block, layer, K|V, kv_head, token, head_dim]. Written once so that no page faults are measured."""
    block = (SHAPE.layers, 2, SHAPE.kv_heads, PAGE_SIZE, SHAPE.head_dim)
    size = blocks * PAGE_SIZE * SHAPE.kv_bytes_per_token
    return allocate(size, block, torch.bfloat16, torch.device("cpu")).fill_(1)


def layout(shape: ModelShape = SHAPE, page_size: int = PAGE_SIZE) -> common_pb2.KvLayout:
    """The KV layout of an engine with this model in bf16, on one rank."""
    return common_pb2.KvLayout(
        wire_version=WIRE_VERSION,
        model_id="bench",
        dtype="bfloat16",
        page_size=page_size,
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tensor_parallel=1,
    )
