"""A step that has been launched and whose tokens the host has not read, and when the next one can be launched before that.

launch 1 ─► launch 2 ─► collect 1 ─► launch 3 ─► collect 2 …
               │            └ an end is noticed here: step 2 has computed a token too many, which is dropped
               └ takes the tokens of step 1 from the device
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from engine.cache.block_pool import BlockPool
from engine.next_tokens import PendingTokens
from engine.plan import PlanItem, StepPlan
from engine.prompt_scores import Scores
from engine.request import SamplingParams, StepOutput
from engine.scheduler.decision import StepDecision
from engine.scheduler.sequence import Sequence
from engine.scheduler.sequence import SequenceState as S


@dataclass(eq=False)
class Flight:
    decision: StepDecision
    plan: StepPlan
    pending: PendingTokens
    output: StepOutput
    logits: Tensor  # [tokens of the plan that want them, vocab]
    scores: list[Scores] = field(default_factory=list)  # of the plan's scored items
    pooled: list[Tensor] = field(default_factory=list)  # of the plan's pooled items
    # Its sequences have been advanced by their token, which is -1 - i until the host has read entry i of `pending`.
    followed: bool = False
    # Sequences whose token before this step was drawn again: it has computed a wrong token for them.
    discarded: set[Sequence] = field(default_factory=set)
    held: dict[int, None] = field(default_factory=dict)  # blocks that it writes, of sequences that have left
    # Items that it computes though they are not of its decision, and so many drafts behind each
    left_out: list[tuple[Sequence, PlanItem, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.decision.scheduled.values())

    def keeps(self, sequence: Sequence) -> bool:
        """Whether the step's result for this sequence is used."""
        return sequence.state is S.RUNNING and sequence not in self.discarded

    def follow(self) -> None:
        """Advance the sequences by their next tokens, which only the device has."""
        self.followed = True
        for index, sequence in enumerate(self.decision.scheduled):
            if self.keeps(sequence):
                sequence.num_computed += 1
                sequence.tokens.append(-1 - index)

    def redrawn(self) -> set[Sequence]:
        """After the results are read: the sequences whose token differs from the one that the device went on with. Of a
        sequence whose result is dropped the next step has not taken the device's token."""
        draws = self.pending.draws
        return {
            draw.sequence
            for index, draw in enumerate(draws)
            if self.keeps(draw.sequence) and self.pending.redrawn(index)
        }

    def hold_left(self, pool: BlockPool, page: int) -> None:
        """Keep the blocks that the step may still be writing from other use, if their sequences have left."""
        drafts = self.decision.drafts
        own = ((s, item, len(drafts.get(s, ()))) for s, item in self.decision.own_items(self.plan))
        for sequence, item, drafted in chain(own, self.left_out):
            if not sequence.blocks:
                reached = item.end + drafted
                first, end = item.begin // page, -(-reached // page)
                written = [block for block in item.block_ids[first:end] if block not in self.held]
                pool.retain(written, sequence.request.tenant)
                self.held.update(dict.fromkeys(written))

    def release(self, pool: BlockPool) -> None:
        pool.free(list(self.held))
        self.held = {}


def predictable(flight: Flight) -> bool:
    """Whether the next step can be planned without this one's tokens: each sequence gets one, and nothing that depends on
    which one it is has to be computed on the host."""
    if flight.decision.drafts:  # how many of them are accepted is known afterwards only
        return False
    return flight.pending.all_begun and all(
        item.num_logits == len(item.token_ids) == 1 and _plain(sequence)
        for sequence, item in flight.decision.own_items(flight.plan)
    )


def _plain(sequence: Sequence) -> bool:
    request = sequence.request
    return (
        sequence.num_computed >= sequence.num_prompt
        and not request.prefill_only
        and not request.export
        and request.grammar is None  # its mask depends on the preceding token
        and not _reads_output(request.sampling)
    )


def _reads_output(params: SamplingParams) -> bool:
    """Penalties need the tokens before, and so do words of several tokens."""
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        return True
    return bool(params.bad_words) and params.word_endings.depend_on_output
