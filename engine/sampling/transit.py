"""Copies numbers between host and device, once each way per step, through pinned memory on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SMALLEST = 4096  # numbers of a buffer


class _Host:
    """A host buffer of 64-bit numbers that grows."""

    def __init__(self, pinned: bool):
        self._pinned = pinned
        self._fit(_SMALLEST)

    def _fit(self, size: int) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int64, pin_memory=self._pinned)
        self.array: NDArray[np.int64] = self.tensor.numpy()

    def at_least(self, size: int) -> _Host:
        if size > len(self.array):
            self._fit(1 << (size - 1).bit_length())
        return self


class Transit:
    """There are two host buffers each way, used in turn: one step's may still be copied when the next one's is written."""

    def __init__(self, device: torch.device):
        self._device = device
        pinned = device.type == "cuda"
        self._up, self._down = ([_Host(pinned) for _ in range(2)] for _ in range(2))
        self._there = torch.zeros(_SMALLEST, dtype=torch.int64, device=device)
        self._turn = 0

    def next_step(self) -> None:
        self._turn ^= 1

    def send(self, arrays: list[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays of 64-bit numbers to the device. The tensors have the arrays' shapes and are valid until the next
        `send`."""
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        host = self._up[self._turn].at_least(total)
        if total > len(self._there):
            self._there = torch.zeros(len(host.array), dtype=torch.int64, device=self._device)
        if total:
            host.array[:total] = np.concatenate([array.view(np.int64).ravel() for array in arrays])
            self._there[:total].copy_(host.tensor[:total], non_blocking=True)
        parts = self._there[:total].split(sizes)  # type: ignore[no-untyped-call]
        return [
            (part.view(torch.float64) if array.dtype == np.float64 else part).view(array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ]

    def fetch(self, numbers: list[Tensor]) -> Callable[[], list[NDArray[Any]]]:
        """Begin to copy tensors of 64-bit numbers to the host. The returned function waits for the copy and returns a flat
        array per tensor."""
        packed = torch.cat([one.flatten().view(torch.int64) for one in numbers])
        sizes = [one.numel() for one in numbers]
        kinds = [np.float64 if one.dtype is torch.float64 else np.int64 for one in numbers]
        host = self._down[self._turn].at_least(len(packed))
        array = host.array[: len(packed)]
        host.tensor[: len(packed)].copy_(packed, non_blocking=True)
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))

        def read() -> list[NDArray[Any]]:
            if copied is not None:
                copied.synchronize()
            borders = np.cumsum(sizes)[:-1]
            return [
                part.view(kind) for part, kind in zip(np.split(array.copy(), borders), kinds, strict=True)
            ]

        return read
