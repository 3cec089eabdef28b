"""The scheduler's decision for one step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.plan import BlockCopy, PlanItem, StepPlan
from engine.scheduler.sequence import Sequence


@dataclass
class StepDecision:
    """The work of one step, and the reservations and requests that lost their blocks to it."""

    # Tokens to compute; their blocks are allocated.
    scheduled: dict[Sequence, int] = field(default_factory=dict)
    # Tokens after a scheduled sequence's last one; their blocks are allocated.
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    copies: dict[Sequence, BlockCopy] = field(default_factory=dict)  # of a scheduled sequence's last block
    evicted_reservations: list[str] = field(default_factory=list)  # now EVICTED; the worker aborts them
    # To the router: the choices of each request, finished.
    returned: list[list[Sequence]] = field(default_factory=list)
    preemptions: int = 0
    cached_tokens: int = 0  # of the sequences that were admitted

    def plan(self, slots: Mapping[str, int] | None = None) -> StepPlan:
        """The items of the scheduled sequences, then an item for each draft. It attends as any single token to all that
        precede it, also to those of the same step, whose KV is written before attention begins. `slots`: of the loaded
        adapters, by digest; None: no sequence has one."""
        items = [_item(s, count, slots) for s, count in self.scheduled.items()]
        drafts = [
            PlanItem(
                request_id=s.request.request_id,
                token_ids=[token],
                begin=len(s.tokens) + index,
                block_ids=s.blocks,
                row=s.row,
                num_logits=1,
                blocks_in_row=len(s.blocks),
                adapter=_slot(s, slots),
            )
            for s, tokens in self.drafts.items()
            for index, token in enumerate(tokens)
        ]
        return StepPlan(items + drafts, list(self.copies.values()))

    def own_items(self, plan: StepPlan) -> Iterator[tuple[Sequence, PlanItem]]:
        """The scheduled sequences with their items of `plan`, without those of drafts, which stand behind them."""
        return zip(self.scheduled, plan.items[: len(self.scheduled)], strict=True)

    def leave_out(self, plan: StepPlan, late: Collection[Sequence]) -> tuple[StepPlan, list[int]]:
        """Forget that the step computed these sequences, and their drafts. Returns the plan without them, and which rows
        of its logits are left."""
        owners = [*self.scheduled, *(s for s, tokens in self.drafts.items() for _ in tokens)]
        items, rows, row = list[PlanItem](), list[int](), 0
        for owner, item in zip(owners, plan.items, strict=True):
            if owner not in late:
                items.append(item)
                rows += range(row, row + item.num_logits)
            row += item.num_logits
        for sequence in late:
            del self.scheduled[sequence]
            self.drafts.pop(sequence, None)
        return StepPlan(items, plan.copies), rows

    def drop(self, sequence: Sequence) -> None:
        """It has lost its blocks to another one of this step."""
        self.scheduled.pop(sequence, None)
        self.copies.pop(sequence, None)


def _item(s: Sequence, count: int, slots: Mapping[str, int] | None) -> PlanItem:
    # Every running sequence has one in every step: arguments by position, and what few have only where they have it.
    request, begin = s.request, s.num_computed
    end = begin + count
    last, sampling = int(end == len(s.tokens)), request.sampling
    item = PlanItem(
        request.request_id, s.tokens[begin:end], begin, s.blocks, s.row, last, request.export, s.blocks_in_row
    )
    if not (request.adapter or sampling.prompt_logprobs or sampling.pooling):
        return item
    return msgspec.structs.replace(item, adapter=_slot(s, slots), **_scored(s, count), **_pooled(s, count))


def _scored(s: Sequence, count: int) -> dict[str, Any]:
    """Which of the item's tokens are scored: those before a token of the prompt."""
    sampling, end = s.request.sampling, s.num_computed + count
    if not s.unscored:
        return {}
    rows = max(0, min(count, s.num_prompt - 1 - s.num_computed))
    following = s.tokens[end] if end < len(s.tokens) else 0
    return {"scored": rows, "alternatives": sampling.prompt_top_logprobs, "following": following}


def _pooled(s: Sequence, count: int) -> dict[str, Any]:
    """Which of the item's tokens are pooled: those of the prompt."""
    if not (pooling := s.request.sampling.pooling):
        return {}
    return {"pooled": max(0, min(count, s.num_prompt - s.num_computed)), "pooling": pooling}


def _slot(sequence: Sequence, slots: Mapping[str, int] | None) -> int:
    adapter = sequence.request.adapter
    # A missing adapter raises: the base model never takes its place
    return slots[adapter] if slots is not None and adapter else 0
