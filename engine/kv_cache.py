"""The paged KV cache of one rank: [block, layer, K|V, kv_head, token, head_dim]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.process import huge_pages
from cluster.process.memory import available_bytes
from engine.parallel.group import TpGroup

# Shares for an unset kv_memory. CPU: share of the free memory, which other processes use too. CUDA: share of the card's
# total memory, less what is in use; the rest is for activations.
FREE_SHARE_CPU = 0.25
TOTAL_SHARE_CUDA = 0.9


def _card_memory(device: torch.device) -> tuple[int, int]:
    torch.cuda.empty_cache()  # memory that the allocator caches after loading counts as free
    return torch.cuda.mem_get_info(device)


def choose_bytes(
    asked: int,
    device: torch.device,
    beside_bytes: int = 0,
    card_memory: Callable[[torch.device], tuple[int, int]] = _card_memory,
) -> int:
    """Size of one rank's KV pool in bytes; call it after the weights are loaded.

    `beside_bytes` of the same memory will be allocated later; `card_memory` returns (free, total) bytes. Raises
    ConfigError if `asked` is more than a CPU machine has free.
    """
    if asked:
        if device.type == "cpu" and asked > (free := available_bytes()):
            # The kernel commits memory on first use: the worker would start, and be killed later under load.
            raise ConfigError(
                f"kv_memory: {asked} bytes are more than the {free} bytes of free memory: give less, or omit it for a "
                f"share that fits",
                field="kv_memory",
            )
        return asked
    if device.type == "cuda":
        free, total = card_memory(device)
        return max(0, int(total * TOTAL_SHARE_CUDA) - (total - free) - beside_bytes)
    return max(0, int((available_bytes() - beside_bytes) * FREE_SHARE_CPU))


def sized(
    config: EngineConfig, block_bytes: int, device: torch.device, group: TpGroup, beside_bytes: int = 0
) -> EngineConfig:
    """`config` with the pool's size: the smallest over all ranks, because a plan names the same blocks for every rank.

    Raises ConfigError if that holds no whole context, or is more than the memory that is free.
    """
    if config.kv_memory_bytes:
        choose_bytes(config.kv_memory_bytes, device)  # for its check
        return config
    own = choose_bytes(0, device, beside_bytes)
    smallest = int(group.gather_last(torch.tensor([[own]], dtype=torch.int64, device=device)).min())
    check_fits(smallest, block_bytes, config)
    return config.model_copy(update={"kv_memory_bytes": smallest})


def check_fits(pool_bytes: int, block_bytes: int, config: EngineConfig) -> None:
    """Raise ConfigError, with the number of missing bytes, if the pool can't hold one context."""
    blocks = pool_bytes // block_bytes
    needed = -(-config.max_model_len // config.page_size)
    if blocks < needed:
        raise ConfigError(
            f"kv_memory: {pool_bytes} bytes hold {blocks * config.page_size} tokens, one context of "
            f"{config.max_model_len} needs {needed * block_bytes} bytes: {needed * block_bytes - pool_bytes} more, or a "
            f"smaller max_model_len",
            field="kv_memory",
        )


def allocate(
    pool_bytes: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool's blocks, and behind them the null block, which padding of recorded steps writes to. `block_shape` is one
    block's [layer, 2, kv_head, token, dim]."""
    block_bytes = torch.Size(block_shape).numel() * dtype.itemsize
    blocks = pool_bytes // block_bytes + 1
    shape = (blocks, *block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(huge_pages.zeroed(blocks * block_bytes), dtype=dtype).view(shape)
