"""The memory that a rank computes in, the host's or a card's: how much is in use, and the peak of a computation."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from cluster.process.memory import Limit, limits

# A process's use of a card outside torch's allocator: CUDA's context, loaded kernels, NCCL's buffers.
CONTEXT_BYTES = 1 << 30


class DeviceMemory(Protocol):
    """Memory that an allocator keeps for later counts as free. All sizes are in bytes."""

    device: torch.device
    is_host: bool

    def limits(self) -> Sequence[Limit]: ...

    def own_bytes(self) -> int:
        """Bytes in use by this process."""

    def begin_peak(self) -> None:
        """Reset the peak."""

    def peak_bytes(self) -> int:
        """The most in use at a time since `begin_peak`, less what is in use now."""


def memory_of(device: torch.device) -> DeviceMemory:
    return CardMemory(device) if device.type == "cuda" else HostMemory()


class HostMemory:
    """Memory of the machine and its container; a process uses its resident set."""

    device = torch.device("cpu")
    is_host = True

    def __init__(self, process: Path = Path("/proc/self")):
        self._status = process / "status"
        self._clear = process / "clear_refs"

    def limits(self) -> Sequence[Limit]:
        trim_allocator()
        return limits()

    def own_bytes(self) -> int:
        trim_allocator()
        return self._read("VmRSS")

    def begin_peak(self) -> None:
        trim_allocator()
        # Where the kernel can't reset the peak, that of loading counts too: the pool is smaller than it could be.
        with contextlib.suppress(OSError):
            self._clear.write_text("5")

    def peak_bytes(self) -> int:
        peak = self._read("VmHWM")
        return max(0, peak - self.own_bytes())

    def _read(self, name: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        return 0


class CardMemory:
    """Memory of a CUDA device, with all processes on it."""

    is_host = False

    def __init__(self, device: torch.device):
        self.device = device

    def limits(self) -> Sequence[Limit]:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return [Limit(total, free)]

    def own_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device) + CONTEXT_BYTES

    def begin_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_reserved(self.device)  # with gaps between allocations
        torch.cuda.empty_cache()
        return max(0, peak - torch.cuda.memory_reserved(self.device))


def trim_allocator() -> None:
    """Return freed host memory to the system: loading frees the tensors that packed weights were made from."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
