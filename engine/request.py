"""The engine's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from cluster.errors import EngineRequestError
from cluster.grammar.spec import GrammarSpec
from cluster.protocol.pooling import Pooling
from engine.word_endings import WordEndings

if TYPE_CHECKING:
    from engine.compiled_grammar import CompiledGrammar
    from engine.prompt_scores import Scores


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"


MAX_PENALTY = 1e6


def _between(low: float, high: float, default: float) -> float:
    number: float = field(default=default, metadata={"bounds": (low, high)})
    return number


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; engine/sampling documents the order of operations.

    Numbers with bounds can be computed within them; a router's bounds for clients are narrower.
    """

    temperature: float = _between(0.0, 1e6, default=1.0)
    top_k: int = 0
    top_p: float = _between(0.0, 1.0, default=1.0)
    min_p: float = _between(0.0, 1.0, default=0.0)
    repetition_penalty: float = _between(0.0, MAX_PENALTY, default=1.0)
    presence_penalty: float = _between(-MAX_PENALTY, MAX_PENALTY, default=0.0)
    frequency_penalty: float = _between(-MAX_PENALTY, MAX_PENALTY, default=0.0)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False  # of the prompt's tokens: no cached prefix is used until all are reported
    prompt_top_logprobs: int = 0
    pooling: Pooling = Pooling.NONE  # of the prompt's hidden states to its embedding
    allowed_tokens: bytes = b""  # a bit for each token id, the lowest first; empty: all may be drawn
    bad_words: tuple[Sequence[int], ...] = ()  # token ids of sequences that the output may not have

    @cached_property
    def word_endings(self) -> WordEndings:
        """Of `bad_words`, of which there is one."""
        return WordEndings(self.bad_words)


SAMPLING_BOUNDS: Mapping[str, tuple[float, float]] = {
    one.name: one.metadata["bounds"] for one in fields(SamplingParams) if one.metadata
}


@dataclass(frozen=True)
class EngineRequest:
    """One request, or one attempt at it.

    `output_tokens` are tokens that earlier attempts already sent (n = 1 only): they are computed like prompt,
    but penalties, limits, positions and `sampling.max_tokens` count them as output. With `prefill_only` the engine
    samples every choice's first token and then holds the blocks until `Engine.abort`.

    Every choice matches the `grammar`: an end-of-sequence token is drawn where, and only where, the grammar allows it, and
    ends the choice whatever `min_tokens` and `ignore_eos` say. `compiled` is this grammar: no step then compiles it.
    """

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    compiled: CompiledGrammar | None = field(default=None, compare=False, repr=False)
    output_tokens: list[int] = field(default_factory=list)
    first_choice: int = 0
    n: int = 1
    salt: bytes = bytes(16)
    adapter: str = ""  # digest of the adapter that it is computed with; "": the base model
    priority: int = 0  # above 0 is high, 0 normal, below 0 batch
    waits_as: int | None = None  # priority until its first step, where an earlier wait has raised its class
    tenant: str = ""
    weight: float = 1.0  # of the tenant, relative to other tenants
    prefill_only: bool = False
    export: bool = False  # every computed layer goes to the export sink


@dataclass(frozen=True)
class TokenOutput:
    """One sampled token. `position` is its index in prompt + output."""

    request_id: str
    choice: int
    position: int
    token_id: int
    logprob: float = 0.0
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True)
class PromptOutput:
    """Log probabilities of tokens of a prompt, from `position` on."""

    request_id: str
    position: int
    scores: Scores


@dataclass(frozen=True)
class PromptEmbedding:
    """The embedding of a whole prompt."""

    request_id: str
    token_id: int  # the prompt's last
    vector: bytes  # float32, little-endian


@dataclass(frozen=True)
class PromptChunk:
    """The tokens that one step computed of a prompt, or of output that an earlier attempt sent; monotonic seconds."""

    began: float
    ended: float
    tokens: int


@dataclass(frozen=True)
class RequestDone:
    """A request left the engine's batch: every choice finished, it goes back to the router, or it failed."""

    request_id: str
    preempted: bool = False  # goes back to the router at its position
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    prompt_compute_seconds: float = 0.0  # its share, by tokens, of the steps that computed them
    chunks: tuple[PromptChunk, ...] = ()
    error: EngineRequestError | None = None  # set if it failed; exported blocks stay allocated until `abort`


@dataclass(frozen=True)
class StepOutput:
    tokens: list[TokenOutput]
    done: list[RequestDone]
    evicted_reservations: list[str] = field(default_factory=list)  # growth needs their blocks: abort them
    began: float = 0.0  # monotonic seconds
    prompts: list[PromptOutput | PromptEmbedding] = field(default_factory=list)  # before `tokens`

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.done or self.evicted_reservations or self.prompts)


@dataclass(frozen=True)
class ChainReport:
    """The first `held` blocks of the prefix chain `hashes` (16 bytes each, from the root) are cached here."""

    hashes: list[bytes]
    held: int


@dataclass
class EngineStats:
    """Counters since the start, and present gauges."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    waiting_prefill_tokens: int = 0
    resident_tokens: int = 0
    blocks_total: int = 0
    blocks_free: int = 0  # never used or only cached: available to a new request
    blocks_held: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0
    draft_steps: int = 0  # of one sequence each
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    draft_failures: int = 0
    prefill_chunks: int = 0
    preemptions: int = 0
    reservations_evicted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class EngineReservation:
    """Blocks reserved for a hand-off's KV."""

    block_ids: list[int]
    held_tokens: int  # leading tokens whose KV is in the blocks already
