"""The paged KV cache of one rank: [block, layer, K|V, kv_head, token, head_dim]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import ConfigError
from cluster.process import huge_pages
from cluster.process.memory import room_bytes
from engine.device_memory import DeviceMemory
from engine.parallel.group import TpGroup

# Host memory of one block beside its KV: entries in the tables of the block pool and the prefix cache.
BOOKKEEPING_BYTES = 512


class Needs(NamedTuple):
    """Bytes of a rank's memory that are not in use yet and not for its KV pool."""

    weights: int  # 0 once they are loaded
    step: int  # the largest step, while it runs
    handoff: int  # the landing ring, or staging
    recorded: int = 0  # decode steps recorded or listed as jobs, and the null block for their padding
    draft: int = 0  # the draft model's KV pool in host memory, which is in use only once it is written to
    adapter: int = 0  # what reading one takes of main memory, one at a time

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        names = (
            "the weights",
            "the largest step",
            "hand-offs",
            "decode steps",
            "the draft model's KV",
            "reading an adapter",
        )
        return " and ".join(f"{size} for {name}" for size, name in zip(self, names, strict=True) if size)


def sized(
    config: EngineConfig, block_bytes: int, memory: DeviceMemory, group: TpGroup, needs: Needs
) -> EngineConfig:
    """`config` with the pool's size: the smallest over all ranks, because a plan names the same blocks for every rank.

    Raises ConfigError if the pool holds no whole context, or a given size does not fit.
    """
    if config.kv_memory_bytes:
        _check_given(config, memory, needs)
        return config
    room = room_for_pool(config, block_bytes, memory, needs)
    own = torch.tensor([[room]], dtype=torch.int64, device=memory.device)
    smallest = int(group.gather_last(own).min())
    _check_left(smallest, config, block_bytes, memory, needs)
    return config.model_copy(update={"kv_memory_bytes": smallest})


def check_before_load(config: EngineConfig, block_bytes: int, memory: DeviceMemory, needs: Needs) -> None:
    """Raise ConfigError if a given pool will not fit beside the weights, or the rule will leave less than one context."""
    if config.kv_memory_bytes:
        _check_given(config, memory, needs)
    else:
        room = room_for_pool(config, block_bytes, memory, needs)
        _check_left(room, config, block_bytes, memory, needs)


def room_for_pool(config: EngineConfig, block_bytes: int, memory: DeviceMemory, needs: Needs) -> int:
    """Bytes that the rule leaves for the pool on this rank; negative if it leaves nothing.

    memory_utilization × total − what all processes use − `needs`
    memory_bytes − what this process uses − `needs`, if that is set and less
    """
    room = room_bytes(memory.limits(), config.memory_utilization)
    if config.memory_bytes:
        room = min(room, config.memory_bytes - memory.own_bytes())
    room -= needs.total
    if memory.is_host:
        room = room // (block_bytes + BOOKKEEPING_BYTES) * block_bytes
    return room


def _check_given(config: EngineConfig, memory: DeviceMemory, needs: Needs) -> None:
    # The kernel commits host memory on first use: the worker would start, and be killed later under load.
    asked, free = config.kv_memory_bytes, min(limit.free for limit in memory.limits()) - needs.total
    if asked > free:
        beside = f" beside {needs}" if needs.total else ""
        raise ConfigError(
            f"kv_memory: {asked} bytes are more than the {max(0, free)} bytes of free memory{beside}, by {asked - free}: "
            f"give less, or omit it for a share that fits",
            field="kv_memory",
        )


def _check_left(
    room: int, config: EngineConfig, block_bytes: int, memory: DeviceMemory, needs: Needs
) -> None:
    """`room`: what the rule leaves on the rank with the least."""
    if missing := missing_bytes(room, block_bytes, config):
        setting, bound = _tightest_bound(config, memory)
        raise ConfigError(
            f"{bound} leaves {max(0, room)} bytes for the KV pool{f' beside {needs}' if needs.total else ''}"
            f"{' (the least of all ranks)' if config.tensor_parallel > 1 else ''}, one context of {config.max_model_len} "
            f"tokens needs {missing} more: lower max_model_len or max_batch_tokens, use more ranks (tensor_parallel), or "
            f"free what else uses this memory",
            field=setting,
        )


def _tightest_bound(config: EngineConfig, memory: DeviceMemory) -> tuple[str, str]:
    """(the setting that leaves the pool least, its value and what of it is in use, for the error)"""
    share = config.memory_utilization
    limit = min(memory.limits(), key=lambda one: room_bytes([one], share))
    own = memory.own_bytes()
    if config.memory_bytes and config.memory_bytes - own < room_bytes([limit], share):
        return "memory", f"memory: {config.memory_bytes} bytes, {own} of them in use,"
    return (
        "memory_utilization",
        f"memory_utilization: {share:g} of {limit.total} bytes, {limit.used} of them in use,",
    )


def missing_bytes(pool_bytes: int, block_bytes: int, config: EngineConfig) -> int:
    """Bytes that a pool lacks to hold one context."""
    needed = config.context_blocks
    return 0 if pool_bytes // block_bytes >= needed else needed * block_bytes - pool_bytes


def check_fits(pool_bytes: int, block_bytes: int, config: EngineConfig) -> None:
    """Raise ConfigError, with the number of missing bytes, if a pool of a given size can't hold one context."""
    if missing := missing_bytes(pool_bytes, block_bytes, config):
        raise ConfigError(
            f"kv_memory: {pool_bytes} bytes hold {pool_bytes // block_bytes * config.page_size} tokens, one context of "
            f"{config.max_model_len} needs {pool_bytes + missing} bytes: {missing} more, or a smaller max_model_len",
            field="kv_memory",
        )


def allocate(
    pool_bytes: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Zeros [blocks + 1, *block_shape]: as many blocks as fit `pool_bytes`, then the null block, which padding of recorded
    steps reads and writes. `block_shape` is [layer, 2, kv_head, token, dim]."""
    block_bytes = torch.Size(block_shape).numel() * dtype.itemsize
    blocks = pool_bytes // block_bytes + 1
    shape = (blocks, *block_shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(huge_pages.zeroed(blocks * block_bytes), dtype=dtype).view(shape)
