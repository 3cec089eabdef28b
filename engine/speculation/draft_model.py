"""Drafts by a small model with the target's vocabulary. It runs in the leader's process and has a KV pool of its own.

    missing tokens of each sequence ─► chunks, up to CATCH_UP_TOKENS ─► last tokens ─► first drafts ─► second drafts …

A sequence has no drafts until its chunks have reached its last token, so a long prompt delays no step by more than one
chunk. Each draft is the most likely token, whatever the request's sampling is: the target's own draw decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol
from weakref import WeakSet

from torch import Tensor

from cluster.config.worker import EngineConfig
from cluster.errors import InternalError
from engine.model.config import ModelConfig
from engine.plan import PlanItem, StepPlan, table_rows
from engine.scheduler.sequence import Sequence
from engine.speculation.draft_cache import CachedSequence, DraftCache

# Of all sequences, in one step of the target; a short one, because running requests wait for it.
CATCH_UP_TOKENS = 128
# Tokens that the chunks of a step attend to, about: 128 tokens behind 8,191, fewer behind more, where attention takes
# longer than the rest of the model. A step's first chunk has up to MIN_CHUNK tokens, so that no context is left out.
CATCH_UP_ATTENDED = 1 << 20
MIN_CHUNK = 16
# Missing tokens that are computed as single tokens, by the kernels of decode steps: two if all drafts were accepted.
MAX_SINGLE = 2


class DraftRunner(Protocol):
    """Runs the draft model; engine/speculation/load_draft.py makes a ModelRunner with these settings."""

    num_blocks: int
    page_size: int
    config: EngineConfig
    model_config: ModelConfig

    def execute(self, plan: StepPlan) -> Tensor:
        """float32 logits [tokens that want them, vocab]."""


class DraftModel:
    """Drafts the most likely tokens of a small model. Implements DraftMethod."""

    def __init__(self, runner: DraftRunner):
        self._runner = runner
        # Sequences with tokens that only the target has: its vocabulary may be larger.
        self._foreign = WeakSet[Sequence]()
        self._max_len, self._vocab = runner.config.max_model_len, runner.model_config.vocab_size
        rows = table_rows(runner.config.max_batch_tokens, runner.num_blocks)
        self.cache = DraftCache(runner.num_blocks, runner.page_size, rows)

    def propose(self, asked: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Raises InternalError if logits of the draft model are not finite."""
        self.cache.drop_stopped()
        held, counts = dict[Sequence, CachedSequence](), dict[Sequence, int]()
        for sequence, most in asked.items():
            if sequence in self._foreign:
                continue
            # Of the last draft nothing is computed.
            count = min(most, self._max_len - len(sequence.tokens) + 1)
            if count < 1:
                self.cache.drop(sequence)
            elif cached := self.cache.hold(sequence, len(sequence.tokens) + count - 1, asked):
                if max(sequence.tokens[cached.length :]) < self._vocab:
                    held[sequence], counts[sequence] = cached, count
                else:
                    self._foreign.add(sequence)
                    self.cache.drop(sequence)
        self._catch_up(held)
        ready = {one: cached for one, cached in held.items() if len(one.tokens) - cached.length <= MAX_SINGLE}
        return self._draft(ready, counts) if ready else {}

    def _catch_up(self, held: Mapping[Sequence, CachedSequence]) -> None:
        """Compute missing tokens up to the last one, as far as a step allows; the fewest first, so that a long prompt
        holds back no short one."""
        left, attended, items = CATCH_UP_TOKENS, CATCH_UP_ATTENDED, list[PlanItem]()
        missing_of = {one: len(one.tokens) - 1 - cached.length for one, cached in held.items()}
        for sequence, missing in sorted(missing_of.items(), key=lambda one: one[1]):
            cached = held[sequence]
            if missing < MAX_SINGLE:
                continue
            each = cached.length + 1
            count = min(missing, left, max(attended // each, 0 if items else MIN_CHUNK))
            if count < 1:
                break
            left, attended = left - count, attended - count * each
            items.append(_item(sequence, cached, sequence.tokens[cached.length : cached.length + count], 0))
            cached.length += count
        if items:
            self._runner.execute(StepPlan(items, []))

    def _draft(
        self, ready: Mapping[Sequence, CachedSequence], counts: Mapping[Sequence, int]
    ) -> dict[Sequence, list[int]]:
        drafts: dict[Sequence, list[int]] = {one: [] for one in ready}
        live = list(ready)
        items, lasts = list[PlanItem](), list[int]()
        for sequence, cached in ready.items():
            # Single tokens of one row, each with logits, as drafts are in the target's steps: a step of such tokens is
            # recorded, or a list of jobs.
            for token in sequence.tokens[cached.length :]:
                items.append(_item(sequence, cached, [token], 1))
                cached.length += 1
            lasts.append(len(items) - 1)
        while True:
            tokens = self.most_likely(self._runner.execute(StepPlan(items, [])))
            for sequence, last in zip(live, lasts, strict=True):
                drafts[sequence].append(tokens[last])
            live = [one for one in live if len(drafts[one]) < counts[one]]
            if not live:
                return drafts
            items, lasts = [], list(range(len(live)))
            for sequence in live:
                cached, token = ready[sequence], drafts[sequence][-1]
                items.append(_item(sequence, cached, [token], 1))
                cached.drafted.append(token)

    def most_likely(self, logits: Tensor) -> list[int]:
        """The most likely token of each row of logits [rows, vocab]. Raises InternalError if its logit is not finite."""
        best = logits.argmax(-1, keepdim=True)  # NaN wins argmax
        if not bool(logits.gather(-1, best).isfinite().all()):
            raise InternalError("logits of the draft model are not finite")
        tokens: list[int] = best[:, 0].tolist()
        return tokens


def _item(sequence: Sequence, cached: CachedSequence, tokens: list[int], logits: int) -> PlanItem:
    """Plan the tokens that follow the cached ones; logits of the last `logits`. The row holds all blocks afterwards."""
    begin = cached.length + len(cached.drafted)
    item = PlanItem(
        sequence.request.request_id,
        tokens,
        begin,
        cached.blocks,
        cached.row,
        logits,
        blocks_in_row=cached.blocks_in_row,
    )
    cached.blocks_in_row = len(cached.blocks)
    return item
