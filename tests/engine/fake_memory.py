"""The memory of a card or a machine that does not exist, and what steps take of one that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cluster.process.memory import Limit
from engine import largest_step

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


def noted_step_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each largest step takes that is measured from now on, in bytes."""
    taken: list[int] = []
    measure = largest_step.bytes_taken

    def noted(*arguments: Any) -> int:
        taken.append(measure(*arguments))
        return taken[-1]

    monkeypatch.setattr(largest_step, "bytes_taken", noted)
    return taken
