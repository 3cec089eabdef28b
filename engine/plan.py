"""One step as the leader plans it. Ranks get what it changes for them (engine/step_delta.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cluster.protocol.pooling import Pooling


class PlanItem(msgspec.Struct, frozen=True, gc=False):  # a struct: 256 of them in 0.1 ms
    """The tokens of one sequence that this step computes.

    begin                    end
      │ num_computed_tokens   │ begin + len(token_ids)
      ▼                       ▼
    ──[t0 t1 t2 … ]───────────  positions in prompt + output
    """

    request_id: str
    token_ids: list[int]
    begin: int
    block_ids: list[int]  # blocks of positions [0, end), in order; perhaps more
    row: int  # of the block tables; only drafts of a sequence share its row
    num_logits: int  # of the last tokens, so many; 1 when `end` reaches the last known token: one is sampled
    export: bool = False
    blocks_in_row: int = 0  # the row holds so many leading blocks already
    adapter: int = 0  # slot of the request's adapter; 0: the base model
    scored: int = 0  # so many of the first tokens: the log probability of the token after each is wanted
    alternatives: int = 0  # and so many of the largest
    following: int = 0  # the token after the last one, where that is scored
    pooled: int = 0  # so many of the first tokens are pooled to the prompt's embedding
    pooling: Pooling = Pooling.NONE

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


def table_rows(max_batch_tokens: int, num_blocks: int) -> int:
    """The most sequences of one step: each computes a token, and writes to a block that no other one holds."""
    return min(max_batch_tokens, num_blocks)


class ExportSink(Protocol):
    """Where the KV of exported requests goes: the hand-off's end on a prefill worker's rank."""

    def layer_computed(
        self, request_id: str, layer: int, token_begin: int, token_end: int, block_ids: Sequence[int]
    ) -> None:
        """The KV of `layer` for positions [token_begin, token_end) is final in the rank's cache (on CUDA: after the work
        that the current stream has now). Called on the rank's engine thread; must return in microseconds."""
