"""Requests for completions and chats as OpenAI's and vLLM's clients send them.

Each model yields the checks of its endpoint and its schema in `/openapi.json`. What no field alone decides is checked by
router/request/validator.py: prompt and max_tokens together fit the context, min_tokens ≤ max_tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationInfo
from pydantic.json_schema import WithJsonSchema

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from cluster.protocol.priority import PRIORITIES
from router.frontends.http.openai.grammar_fields import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from router.frontends.http.openai.neutral_fields import Ignored, NeutralFields
from router.frontends.http.openai.tool_fields import CHOICE_SCHEMA, TOOLS_SCHEMA
from router.request.fields import (
    Length,
    OnlyNeutral,
    RequestModel,
    late,
    limits_of,
    numbered,
    read,
    refuse,
    same_json,
    unsupported,
    wrong,
)
from router.request.grammar.requested import RequestedGrammar
from router.request.limits import FieldLimits
from router.request.messages import AnyMessage, chat_size, read_messages
from router.request.options import (
    AnswerTokens,
    Flag,
    LogprobCount,
    Priority,
    ReasoningEffort,
    TokenId,
    TruncatePromptTokens,
    template_effort,
)
from router.request.token_options import TokenOptions
from router.request.tools import (
    MAX_KWARGS,
    check_count,
    check_kwargs,
    check_size,
    read_choice,
    read_tools,
    tools_size,
)
from router.text.conversation import Conversation

MAX_CACHE_SALT = 256  # characters
COMPLETION_TOKENS = 16  # OpenAI's default for completions; a chat takes what the context leaves
GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
# Objects have no other fields, where the router does not ignore unknown ones
CLOSED = ConfigDict(json_schema_extra={"additionalProperties": {"$limit": "ignore_unknown"}})


def _stream_options(value: object, info: ValidationInfo) -> object:
    if (
        isinstance(value, dict)
        and not StreamOptions.names.issuperset(value)
        and not limits_of(info).ignore_unknown
    ):
        raise wrong(f"may only hold {', '.join(sorted(StreamOptions.names))}")
    return value


def _priority(value: object, info: ValidationInfo) -> object:
    """A class name, or a number whose sign names one."""
    if isinstance(value, str):
        if value not in PRIORITIES:
            raise wrong(f"must be a whole number or one of {', '.join(PRIORITIES)}")
        return PRIORITIES[value]
    return -value if type(value) is int and limits_of(info).lower_first else value


def _named(value: object) -> object:
    return "" if value is None else value


def _model(value: str, info: ValidationInfo) -> str:
    limits_of(info).check_model(value)
    return value


# Adapters come and go while a router runs: the document does not list their names
_MODEL_SCHEMA = {"anyOf": [{"enum": {"$limit": "accepted_names"}}, {"type": ["string", "null"]}]}
ModelName: TypeAlias = Annotated[
    str, BeforeValidator(_named), AfterValidator(_model), WithJsonSchema(_MODEL_SCHEMA)
]
MODEL_DESCRIPTION = "empty or null = the first of /v1/models; also the name of an adapter that it lists"
AskedPriority: TypeAlias = Annotated[
    Priority | None,
    BeforeValidator(_priority, Priority | Literal["high", "normal", "batch"] | None),
    Field(json_schema_extra={"description": {"$limit": "priority_signs"}}),
]
CacheSalt: TypeAlias = Annotated[
    Annotated[str, Length(1, MAX_CACHE_SALT)] | None,
    Field(description="cached prefixes are shared only among the tenant's requests with the same salt"),
]


def _best_of(value: object, info: ValidationInfo) -> None:
    """Choosing n of more candidates is not supported."""
    if value is not None and not same_json(value, info.data.get("n") or 1):
        raise unsupported("must equal n")


class StreamOptions(RequestModel):
    model_config = CLOSED

    include_usage: Flag = Field(None, description="a last chunk with the answer's usage and no choices")
    include_obfuscation: Flag = Field(None, description="changes nothing")
    continuous_usage_stats: Flag = Field(None, description="each chunk with the usage so far")


class HttpRequest(TokenOptions, NeutralFields):
    """The fields of both endpoints."""

    model_config = CLOSED
    error_names: ClassVar[Mapping[str, str]] = {"max_completion_tokens": "max_tokens"}

    truncate_prompt_tokens: TruncatePromptTokens = Field(
        None,
        description="keeps only this many tokens of the prompt's end; -1: as many as leave room for max_tokens",
    )
    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    best_of: Annotated[
        Any, PlainValidator(_best_of, Annotated[int, late(minimum=1, maximum="max_choices")] | None)
    ] = Field(None, description="must equal n")
    max_completion_tokens: AnswerTokens | None = Field(None, description="goes before max_tokens")
    include_stop_text: Flag = Field(None, alias="include_stop_str_in_output")
    priority: AskedPriority = None
    cache_salt: CacheSalt = None
    stream: Flag = None
    stream_options: Annotated[StreamOptions, BeforeValidator(_stream_options)] | None = Field(
        None, description="changes nothing without stream"
    )
    return_token_ids: Flag = None
    spaces_between_special_tokens: Flag = Field(
        None, description="changes nothing: special tokens are never shown"
    )

    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None
    guided_json: GuidedJson = None
    guided_regex: GuidedRegex = None
    guided_choice: GuidedChoice = None
    guided_grammar: GuidedGrammar = None

    prompt_logprobs: LogprobCount | None = Field(
        None, description="alternatives to each token of the prompt; not with stream, which shows none"
    )

    @property
    def asked_grammar(self) -> RequestedGrammar | None:
        sent = self.model_fields_set
        given = [
            RequestedGrammar(name, spec)
            for name in GRAMMAR_FIELDS
            if name in sent and (spec := getattr(self, name)) is not None
        ]
        if len(given) > 1:
            raise refuse(given[1].field, f"not with {given[0].field}: an answer has one grammar")
        return given[0] if given else None

    @property
    def token_limit(self) -> int | None:
        """The newer name goes before the older one, which must make sense all the same."""
        older, newer = self.max_tokens, self.max_completion_tokens
        if newer is None:
            return older
        if older is not None and older < 1:
            raise refuse("max_tokens", "must be a whole number above 0")
        return newer

    @property
    def prompt_alternatives(self) -> int | None:
        if self.prompt_logprobs and self.stream:
            raise refuse("prompt_logprobs", "not with stream")
        # Streams do not show them: 0 is left out, as in vLLM
        return None if self.stream else self.prompt_logprobs

    @property
    def truncates(self) -> bool:
        return self.truncate_prompt_tokens is not None

    def kept(self, prompt: Sequence[int], context: int) -> Sequence[int]:
        """The prompt's last `truncate_prompt_tokens` tokens; -1 keeps as many as leave room for max_tokens."""
        count = self.truncate_prompt_tokens
        if count is None:
            return prompt
        if count == -1:
            count = max(1, context - max(1, self.token_limit or 1))
        return prompt[-count:]


def _prompts(value: object, info: ValidationInfo) -> list[str | list[int]]:
    """A text, token ids, or a list of either."""
    limits, name = limits_of(info), info.field_name or "prompt"
    most = limits.settings.max_prompts
    truncates = info.data.get("truncate_prompt_tokens") is not None
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("must be text, token ids, or a list of either")
    if len(value) > most:  # counted before anything looks at each
        if type(value[0]) is not int:
            raise wrong(f"at most {most} at once (max_prompts)", most)
        if not truncates:
            limits.check_lengths(len(value), field=name)
    if set(map(type, value)) == {int}:
        return [value]
    for index, one in enumerate(value):
        if isinstance(one, list) and not truncates:
            limits.check_lengths(len(one), field=numbered(name, index, len(value)))
        if not (isinstance(one, str) or (isinstance(one, list) and set(map(type, one)) <= {int})):
            raise wrong("a list must hold texts or token ids")
    return value


_Tokens: TypeAlias = Annotated[list[TokenId], late(minItems=1, maxItems="room")]
_Several: TypeAlias = Annotated[list[str | _Tokens], late(minItems=1, maxItems="max_prompts")]
Prompts: TypeAlias = Annotated[list[str | list[int]], PlainValidator(_prompts, str | _Tokens | _Several)]


class CompletionRequest(HttpRequest):
    prompt_embeds: Annotated[Any, OnlyNeutral()] = None
    add_special_tokens: Annotated[Any, OnlyNeutral(True)] = None
    tools: Annotated[Any, OnlyNeutral([])] = None
    tool_choice: Annotated[Any, OnlyNeutral("none", "auto")] = None
    parallel_tool_calls: Ignored = None
    reasoning_effort: Annotated[Any, OnlyNeutral()] = None
    max_tokens: Annotated[int, late(minimum=0, maximum="room")] | None = Field(
        None, description="0, with echo only: the prompt is computed, and no token is generated"
    )
    echo: Flag = Field(None, description="the prompt's text before the answer's")
    prompt: Prompts = Field(description="text, token ids, or several of either")

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def prompt_alternatives(self) -> int | None:
        own = super().prompt_alternatives
        if not self.echoes or self.logprobs is None:
            return own
        return max(self.logprobs, own or 0)

    @property
    def token_limit(self) -> int | None:
        given = super().token_limit
        return COMPLETION_TOKENS if given is None else given


def counted_messages(value: object, info: ValidationInfo) -> list[Any]:
    """Counted only: those of a long conversation are read on a thread."""
    if not isinstance(value, list) or not value:
        raise wrong("must be a non-empty list")
    limits_of(info).check_messages(len(value))
    return value


def counted_tools(value: object, info: ValidationInfo) -> list[Any]:
    """Counted and measured only: each is read with the messages."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong("must be a list")
    limits = limits_of(info)
    try:
        check_count(len(value), limits)
        check_size(value, limits)
    except InvalidRequestError as error:
        raise wrong(error.message.removeprefix("tools: "), error.limit) from None
    return value


_KWARGS_SCHEMA = {
    "type": ["object", "null"],
    "maxProperties": MAX_KWARGS,
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}
TemplateKwargs: TypeAlias = Annotated[Any, WithJsonSchema(_KWARGS_SCHEMA)]


class ChatCompletionRequest(HttpRequest):
    tools: Annotated[list[Any], PlainValidator(counted_tools), WithJsonSchema(TOOLS_SCHEMA)] = Field(
        [], description="functions that the model may call"
    )
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = None
    parallel_tool_calls: Flag = Field(None, description="false: an answer has one call at most")
    chat_template_kwargs: TemplateKwargs = Field(None, description="variables of the chat template")
    add_generation_prompt: Flag = Field(None, description="default: true, but for continue_final_message")
    continue_final_message: Flag = Field(None, description="the answer continues the last message")
    include_reasoning: Flag = Field(None, description="false: reasoning is computed, and not sent")
    add_special_tokens: Annotated[Any, OnlyNeutral(False)] = None
    messages: Annotated[
        list[Any], PlainValidator(counted_messages, Annotated[list[AnyMessage], late(minItems=1)])
    ]
    logprobs: Flag = None
    top_logprobs: LogprobCount | None = Field(None, description="needs logprobs = true")
    reasoning_effort: ReasoningEffort | None = Field(None, description="for chat templates that use it")

    def conversation(self, limits: FieldLimits) -> Conversation:
        """Read messages and tools. Raises InvalidRequestError or UnsupportedFieldError naming a field."""
        tools, choice, name = read_choice(self.tool_choice, read_tools(self.tools, limits))
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise refuse(
                "continue_final_message", "not with add_generation_prompt, which begins a new message"
            )
        return Conversation(
            read_messages(self.messages, limits),
            tools,
            choice,
            name,
            self.parallel_tool_calls is not False,
            check_kwargs(self.chat_template_kwargs),
            template_effort(self.reasoning_effort),
            not continues if self.add_generation_prompt is None else self.add_generation_prompt,
            continues,
        )

    @property
    def size(self) -> int:
        """The cost of rendering it, in characters, before it is read."""
        return chat_size(self.messages) + tools_size(self.tools)

    @property
    def names_tool(self) -> bool:
        """Rather than letting the model choose, also among `allowed_tools`."""
        return isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "function"

    @property
    def alternatives_field(self) -> str:
        return "top_logprobs"

    @property
    def alternatives(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise refuse("top_logprobs", "needs logprobs = true")
        return None


R = TypeVar("R", bound=RequestModel)


def read_request(model: type[R], body: Mapping[str, Any], limits: FieldLimits) -> R:
    """Check a body. Raises InvalidRequestError or UnsupportedFieldError naming a field."""
    if not limits.ignore_unknown and not model.names.issuperset(body):
        name = next(name for name in body if name not in model.names)
        raise UnsupportedFieldError(f"{name}: unknown field of this request", field=name)
    return read(model, body, limits)
