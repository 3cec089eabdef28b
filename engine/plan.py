"""One step as the leader plans it and every rank runs it. Plain data: it is broadcast to the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class PlanItem:
    """The tokens of one sequence that this step computes.

    begin                    end
      │ num_computed_tokens   │ begin + len(token_ids)
      ▼                       ▼
    ──[t0 t1 t2 … ]───────────  positions in prompt + output
    """

    request_id: str
    token_ids: list[int]
    begin: int
    block_ids: list[int]  # blocks of positions [0, end), in order
    wants_logits: bool  # True when `end` reaches the last known token: a token is sampled from its logits
    export: bool = False

    @property
    def end(self) -> int:
        return self.begin + len(self.token_ids)


@dataclass(frozen=True)
class BlockCopy:
    """Copy-on-write: block `source` is copied to `target` before the step runs."""

    source: int
    target: int


@dataclass(frozen=True)
class StepPlan:
    items: list[PlanItem]
    copies: list[BlockCopy]


class ExportSink(Protocol):
    """Where the KV of exported requests goes: the hand-off's end on a prefill worker's rank."""

    def layer_computed(
        self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
    ) -> None:
        """The KV of `layer` for positions [token_begin, token_end) is final in the rank's cache (on CUDA: after the work
        that the current stream has now). Called on the rank's engine thread; must return in microseconds."""
