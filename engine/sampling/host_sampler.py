"""The sampler of CPUs, which draws at once. Its result is also that of another device's batch that failed as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.base import is_sound
from engine.sampling.row import Row
from engine.sampling.sampler import Result, Sampled, sample


class HostDraw:
    def __init__(self, results: list[Result], unsound: set[int], device: torch.device):
        self.redrawn: set[int] = set()
        self.unsound = unsound
        self._results = results
        self._device = device

    @property
    def token_ids(self) -> Tensor:
        known = [one.token_id if isinstance(one, Sampled) else 0 for one in self._results]
        return torch.tensor(known, device=self._device)

    def results(self) -> list[Result]:
        return self._results


class HostSampler:
    def begin(self, logits: Tensor, source: list[int], rows: Sequence[Row]) -> HostDraw:
        results = sample(logits[source], rows) if rows else []
        return HostDraw(results, unsound_rows(logits, source, results), logits.device)


def unsound_rows(logits: Tensor, source: list[int], results: list[Result]) -> set[int]:
    """The failed rows whose logits, as the model gave them, have no finite maximum."""
    failed = (i for i, one in enumerate(results) if not isinstance(one, Sampled))
    return {i for i in failed if not is_sound(logits[source[i]])}
