"""Decode steps of fixed sizes, recorded before the first request and replayed.

    step of 5 sequences ─► the next larger size, 8 ─► buffers: 5 of the step, 3 of padding ─► replay ─► 5 rows of logits

Padding is one more sequence, whose row of the block table names only the null block, which no request reads. So a replay
writes nothing that a request reads, whatever the size.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from engine.graphs.base import Recorder, Recording
from engine.step_buffers import StepBuffers
from engine.step_delta import StepDelta

log = logging.getLogger(__name__)
SIZES = (1, 2, 4, *range(8, 257, 8))


def sizes_for(most: int) -> tuple[int, ...]:
    """The sizes to record for steps of up to `most` sequences; beyond the last one steps are not recorded."""
    return SIZES[: bisect_left(SIZES, most) + 1]


class DecodeGraphs:
    """Runs decode steps in which each sequence has `tokens_each` tokens and all logits are wanted.

    A size is recorded at its first step, which is one of the warm-up.
    """

    def __init__(
        self,
        forward: Callable[[], Tensor],
        step: StepBuffers,
        recorder: Recorder,
        sizes: tuple[int, ...],
        logits: Tensor,
        tokens_each: int = 1,
    ):
        """`forward` computes the step in the buffers and returns float32 logits [tokens, vocab]. Every recording writes to
        `logits`, float32 [largest size · tokens_each, vocab]."""
        self.sizes = sizes
        self._forward = forward
        self._step = step
        self._recorder = recorder
        self._logits = logits
        self._tokens_each = tokens_each
        self._recordings: dict[int, Recording] = {}

    def takes(self, delta: StepDelta) -> bool:
        """Whether `run` can compute this step."""
        each = self._tokens_each
        if delta.exports or len(delta.rows) > self.sizes[-1]:
            return False
        return bool((delta.counts == each).all() and (delta.logits == each).all())

    def run(self, delta: StepDelta, drawn: Tensor | None = None) -> Tensor:
        """float32 logits [tokens, vocab] of the step without its padding, valid until the next step. For `drawn` see
        StepBuffers.load."""
        count = len(delta.rows)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._step.load(delta.padded(size - count, self._tokens_each, self._step.null_row), drawn)
        recording = self._recordings.get(size)
        if recording is None:
            recording = self._recordings[size] = self._record(size)
        recording.replay()
        return self._logits[: count * self._tokens_each]

    def _record(self, size: int) -> Recording:
        self._step.bound_lengths()
        logits = self._logits[: size * self._tokens_each]

        def compute() -> None:
            logits.copy_(self._forward())

        recording = self._recorder.record(compute)
        log.info(
            "decode steps of %d sequences are recorded: %d of %d sizes",
            size, len(self._recordings) + 1, len(self.sizes),
        )  # fmt: skip
        return recording


def recorded(device: torch.device, enabled: bool, capturable: bool) -> bool:
    """Whether decode steps are recorded on this device."""
    return device.type == "cuda" and enabled and capturable


def on_card(device: torch.device, enabled: bool, capturable: bool) -> Recorder | None:
    """The recorder of this device; None where decode steps are not recorded."""
    if not recorded(device, enabled, capturable):
        if recorded(device, enabled, capturable=True):
            log.info(
                "decode steps are not recorded: the attention backend reads lengths on the host, or the model has experts"
            )
        return None
    from engine.graphs.cuda import CudaRecorder

    return CudaRecorder(device)
