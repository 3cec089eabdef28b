"""Arguments and results of the clients. Results are frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict


class Function(TypedDict):
    """A function that is called. `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class MessageCall(TypedDict):
    """A call of an earlier answer."""

    id: str
    function: Function


class Message(TypedDict, total=False):
    """One turn of a conversation: `role` (system, user, assistant, tool) and `content`; the others where they belong."""

    role: str
    content: str
    tool_calls: Sequence[MessageCall]
    tool_call_id: str
    reasoning: str
    name: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation for the model's chat template."""


class GenerateOptions(TypedDict, total=False):
    """Options of text generation. Missing ones come from the model's generation_config.json, else the defaults."""

    max_tokens: int  # default: the rest of the context
    temperature: float  # default 1; 0 is greedy
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None  # None is left out
    n: int  # choices; default 1
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    logprobs: int  # alternatives to report beside the chosen token; left out = none
    prompt_logprobs: int  # the same beside each token of the prompt
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]  # the only tokens of answers
    bad_words: Sequence[str]  # that answers may not have, by their tokens
    include_stop_text: bool
    priority: int  # higher is more important
    # The grammar that every answer must match: at most one of these four
    json_schema: Mapping[str, object] | str
    regex: str
    choice: Sequence[str]
    lark: str
    # Of conversations; tools as OpenAI's API has them
    tools: Sequence[Mapping[str, object]]
    tool_choice: str | None  # none, auto, required, or the name of a tool that is called
    parallel_tool_calls: bool
    template_kwargs: Mapping[str, object]
    reasoning_effort: str
    add_generation_prompt: bool
    continue_final_message: bool


class RequestOptions(GenerateOptions, total=False):
    """Options of text generation and of its call."""

    model: str  # default: the only one
    request_id: str
    explain: bool  # report how the workers were chosen
    timeout_seconds: float | None  # default: the client's


EmbedInputs: TypeAlias = str | Sequence[int] | Sequence[str | Sequence[int]]
"""One text or its token ids, or several of either."""


class EmbedOptions(TypedDict, total=False):
    """Options of embeddings and of their call."""

    model: str  # default: the first one
    dimensions: int  # of shorter vectors, where the checkpoint declares them
    truncate_prompt_tokens: int  # tokens of each input that are kept; -1: as many as the model takes
    truncation_side: str  # left (default): the input's end is kept; right: its beginning
    add_special_tokens: bool  # to texts; default true
    priority: int  # higher is more important
    request_id: str
    timeout_seconds: float | None  # default: the client's


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's log probability, and those of the likeliest alternatives as (token id, logprob). A prompt's token
    has its place among all tokens too: 1 = the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class CallPiece:
    """A further piece of a tool call. `call` counts a choice's calls; `id` and `name` come with the first piece."""

    call: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class ToolCall:
    """A call of an answer. `arguments` is the text of a JSON object, if the model ended it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Chunk:
    """Text and tokens that arrived together for one choice.

    `text` may be empty while a stop string or a UTF-8 sequence is undecided. `content`, `reasoning` and `calls` are the
    same text as the router parsed it; where it does not, all is content.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" | "tool_calls" on the choice's last chunk
    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's next tokens, before the first answer's


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that no worker computed for this request
    reasoning_tokens: int = 0  # of the completion tokens


@dataclass(frozen=True)
class Timings:
    """Time spent on the request by stage (seconds), shipped bytes, and its workers."""

    router_queue_seconds: float = 0.0
    placement_seconds: float = 0.0
    prefill_queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    handoff_exposed_seconds: float = 0.0
    decode_queue_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_step_seconds: float = 0.0  # of decode_seconds
    router_trip_seconds: float = 0.0  # the first token's time between router and worker
    total_seconds: float = 0.0
    kv_bytes_shipped: int = 0
    not_shipped_tokens: int = 0
    transport: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0
    placement_calls: int = 0


@dataclass(frozen=True)
class Choice:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Completion:
    """A whole answer. `reconnects` counts the lost routers."""

    request_id: str
    model: str
    seed: int | None
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    explanation: str = ""
    reconnects: int = 0
    # Of the prompt's tokens but for the first one, if asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


@dataclass(frozen=True)
class Embeddings:
    """A vector for each input, in order. `timings` are the last input's."""

    request_id: str
    model: str
    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class ModelInfo:
    id: str
    max_model_len: int
    created_unix_seconds: int
