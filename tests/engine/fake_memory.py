"""The memory of a card or a machine that does not exist."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.process.memory import Limit

GIB = 1 << 30


class FakeMemory:
    """`used`: of `total` bytes, by all processes; `own`: of these, by this one; `peak`: what a step takes."""

    def __init__(self, total: int, used: int = 0, *, own: int = 0, peak: int = 0, is_host: bool = False):
        self.device, self.is_host = torch.device("cpu"), is_host
        self.total, self.used, self.own, self.peak = total, used, own, peak
        self.calls: list[str] = []

    def limits(self) -> Sequence[Limit]:
        self.calls.append("limits")
        return [Limit(self.total, self.total - self.used)]

    def own_bytes(self) -> int:
        return self.own

    def begin_peak(self) -> None:
        self.calls.append("begin")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return self.peak
