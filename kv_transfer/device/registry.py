"""Chooses the part copier of a device, and says how much of its memory hand-offs take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from cluster.config.worker import TransferConfig
from kv_transfer import memory
from kv_transfer.device import cuda
from kv_transfer.device.base import PartCopier
from kv_transfer.device.cpu import CpuCopier
from kv_transfer.layout.conversion import Conversion

OpenCopier = Callable[[Tensor, int], PartCopier]  # (KV cache, bytes of the largest part)


def open_copier(kv_cache: Tensor, part_bytes: int, conversion: Conversion | None = None) -> PartCopier:
    """`part_bytes`: of the largest part. `conversion`: of parts that are scattered."""
    if kv_cache.device.type == "cpu":
        return CpuCopier(kv_cache, conversion)
    return cuda.CudaCopier(kv_cache, part_bytes, conversion=conversion)


def device_bytes(role: Literal["prefill", "decode"], config: TransferConfig, *, on_cuda: bool) -> int:
    """Upper bound of what one rank's hand-offs take of its device's memory (on a CPU, of main memory) beside the KV cache:
    send staging or the landing ring at its largest, and the copier's buffers."""
    parts = (
        memory.most_slots(config) * config.slot_bytes if role == "decode" else memory.staging_bytes(config)
    )
    return parts + (cuda.device_bytes(_part_bytes(role, config)) if on_cuda else 0)


def pinned_bytes(role: Literal["prefill", "decode"], config: TransferConfig) -> int:
    """Upper bound of the main memory that the hand-offs of one rank on a card pin: for parts on their way through it, and
    for numbers that go to the card and come back."""
    return cuda.host_bytes(_part_bytes(role, config))


def _part_bytes(role: Literal["prefill", "decode"], config: TransferConfig) -> int:
    """Bytes of the largest part."""
    return config.slot_bytes if role == "decode" else memory.largest_part(config)
