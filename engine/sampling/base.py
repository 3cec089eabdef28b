"""The contract of a sampler: a draw is enqueued on the device, and its results are read later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from engine.sampling.row import Row
from engine.sampling.sampler import Result


class PendingDraw(Protocol):
    """One token per row."""

    # After `results`: rows whose token is not that of `token_ids`, and rows whose logits, as the model gave them, had no
    # finite maximum.
    redrawn: set[int]
    unsound: set[int]

    @property
    def token_ids(self) -> Tensor:
        """int64 [rows], on the device; before `results` too."""

    def results(self) -> list[Result]:
        """The token of each row, or the error that ends its request. Waits until the device has computed the draw, and
        everything enqueued before it."""


class Sampler(Protocol):
    def begin(self, logits: Tensor, source: list[int], rows: Sequence[Row]) -> PendingDraw:
        """Begin a draw: row i is drawn from row source[i] of `logits`, fp32 [any, vocab], which must not change until the
        device has computed the draw. There may be no row."""


def is_sound(logits: Tensor) -> bool:
    """Whether a row, as the model gave it, has a finite maximum. If not, the KV that it was computed from is wrong, and
    every request that found it in the prefix cache would fail as well."""
    return bool(logits.max().isfinite())
