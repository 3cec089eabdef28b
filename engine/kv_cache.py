"""The paged KV cache of one rank: [block, layer, K|V, kv_head, token, head_dim]."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster import huge_pages
from cluster.errors import ConfigError
from cluster.memory import available_bytes

# Of the memory that is free, when no size is named: other processes live here too.
FREE_SHARE_CPU = 0.25
FREE_SHARE_CUDA = 0.9


def choose_bytes(asked: int, device: torch.device) -> int:
    """Bytes of one rank's pool. Raises ConfigError where a machine has less memory left than that."""
    if asked:
        if device.type == "cpu" and asked > (free := available_bytes()):
            # Memory is taken as it is used: the worker would be killed later, with what it serves.
            raise ConfigError(
                f"kv_memory: {asked} bytes are more than the {free} bytes of memory that are free: give less, or "
                f"leave it out for a share that fits",
                field="kv_memory",
            )
        return asked
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * FREE_SHARE_CUDA)
    return int(available_bytes() * FREE_SHARE_CPU)


def allocate(
    pool_bytes: int,
    block_shape: tuple[int, ...],
    max_len: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """`block_shape` is one block's [layer, 2, kv_head, token, dim]. Raises ConfigError if the pool can't hold
    one context, saying by how much it falls short."""
    block_bytes = torch.Size(block_shape).numel() * dtype.itemsize
    blocks = pool_bytes // block_bytes
    needed = -(-max_len // page_size)
    if blocks < needed:
        raise ConfigError(
            f"kv_memory: {pool_bytes} bytes hold {blocks * page_size} tokens, one context of {max_len} needs "
            f"{needed * block_bytes} bytes: {needed * block_bytes - pool_bytes} more, or a smaller max_model_len",
            field="kv_memory",
        )
    shape = (blocks, *block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(huge_pages.zeroed(blocks * block_bytes), dtype=dtype).view(shape)
