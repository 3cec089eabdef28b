"""One choice of one request, its blocks and its state.

WAITING ──admitted──► RUNNING ──► FINISHED
   ▲                  │  ▲  └─prefill_only, or parked─► HELD ──► FINISHED
   └───preempted──────┘  └─commit─ WAITING_FOR_KV (reserved, KV on its way)
                                        └──growth needs its blocks──► EVICTED (until all writes ended) ──► FINISHED
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from enum import Enum

from torch import Tensor

from cluster.state_machine import StateMachine
from engine.request import EngineRequest, PromptChunk

HIGHEST_RANK = -1  # of the class high
NO_ROW = -1


class SequenceState(Enum):
    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    EVICTED = "evicted"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


S = SequenceState
TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    S.WAITING: frozenset({S.RUNNING, S.FINISHED}),
    S.WAITING_FOR_KV: frozenset({S.RUNNING, S.EVICTED, S.FINISHED}),
    S.EVICTED: frozenset({S.FINISHED}),
    S.RUNNING: frozenset({S.WAITING, S.HELD, S.FINISHED}),
    S.HELD: frozenset({S.FINISHED}),
}


def rank_of(priority: int) -> int:
    """Rank of the priority's class: high before normal before batch. Priority numbers within a class are equal."""
    return (priority < 0) - (priority > 0)


@dataclass
class PromptWork:
    """The cost of a sequence's prompt so far."""

    tokens: int = 0
    seconds: float = 0.0  # its share, by tokens, of the steps that computed it
    chunks: list[PromptChunk] = field(default_factory=list)


@dataclass(eq=False)
class Sequence:
    """
    ──────────────num_computed────────len(tokens)──
      KV is in the blocks │ to compute │
    """

    request: EngineRequest
    choice: int
    tokens: list[int]
    arrival: int
    state_at_start: InitVar[SequenceState] = SequenceState.WAITING
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_computed: int = 0
    registered_blocks: int = 0  # leading blocks that are in the prefix cache
    row: int = NO_ROW  # of the ranks' block tables
    blocks_in_row: int = 0  # leading blocks that the row holds
    cached_tokens: int = 0
    next_scored: int = 1  # position of the next token of the prompt whose log probability is reported
    pooled: Tensor | None = None  # of the prompt's computed chunks: float32 [hidden]
    prompt_work: PromptWork = field(default_factory=PromptWork)
    paused: bool = False
    awaits_mask: bool = False  # for its next token (engine/grammar_masks.py)
    extra_seat: bool = False  # admitted to a full batch
    # Of steps that do not cover all, the last one that computed it, and its arrival; None if it has been in no order yet.
    turn: tuple[int, int] | None = None
    preempted_at: int = -1  # its tokens at its last preemption
    # At its last look for blocks, if it waits since: cached ones that it found, and its claim to free ones.
    found: int | None = None
    claim: int = 0
    waits_since: float = 0.0  # monotonic seconds: in the queue, and in its class
    rank: int = field(init=False)  # of the request's class; while it waits, of the one that it has aged to
    order: tuple[int, int] = field(init=False)  # sort key: class, then arrival
    machine: StateMachine[SequenceState] = field(init=False)

    def __post_init__(self, state_at_start: SequenceState) -> None:
        # Stored, because every step reads them for every running sequence.
        request = self.request
        aged = request.waits_as if state_at_start is S.WAITING else None
        self.set_rank(rank_of(request.priority if aged is None else aged))
        # Before its prompt is computed: that may not be done twice where the mask is late.
        self.awaits_mask = state_at_start is S.WAITING and request.grammar is not None
        self.machine = StateMachine(state_at_start, TRANSITIONS, request.request_id)

    def set_rank(self, rank: int) -> None:
        self.rank = rank
        self.order = (rank, self.arrival)

    def fork(self, choice: int, token_id: int, blocks: list[int]) -> Sequence:
        """A running sequence for a further choice, which continues with `token_id`. `blocks` hold the KV of all tokens."""
        return Sequence(
            self.request,
            choice,
            [*self.tokens, token_id],
            self.arrival,
            S.RUNNING,
            blocks=blocks,
            hashes=list(self.hashes),
            num_computed=len(self.tokens),
            registered_blocks=self.registered_blocks,
            next_scored=self.next_scored,
            extra_seat=self.extra_seat,
        )

    def preempt(self) -> None:
        """Wait again, with nothing computed; its blocks have been freed."""
        self.num_computed = self.registered_blocks = 0
        self.preempted_at = len(self.tokens)
        self.extra_seat, self.found = False, None
        self.pooled = None
        self.awaits_mask = self.request.grammar is not None
        self.machine.to(SequenceState.WAITING)

    @property
    def state(self) -> SequenceState:
        return self.machine.state

    @property
    def rests(self) -> bool:
        """No step computes it for now. Loops over all running sequences look at both: a call for each costs more."""
        return self.paused or self.awaits_mask

    @property
    def unscored(self) -> bool:
        """Log probabilities of tokens of its prompt are still to be reported."""
        return self.request.sampling.prompt_logprobs and self.next_scored < self.num_prompt

    @property
    def needs_each_position(self) -> bool:
        """Its whole prompt must be computed: no cached prefix is used."""
        return self.unscored or self.request.sampling.pooling.needs_each_position

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def seats(self) -> int:
        """Running sequences that it stands for: before its first token all choices of its request."""
        request = self.request
        return request.n if len(self.tokens) == self.num_prompt and not request.prefill_only else 1

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.num_computed
