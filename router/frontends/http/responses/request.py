"""The request for a response, as OpenAI's clients send it. Its input is counted here and read by input_items.py."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PlainValidator, ValidationInfo
from pydantic.json_schema import WithJsonSchema

from router.frontends.http.openai.neutral_fields import Ignored
from router.frontends.http.openai.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    AskedPriority,
    CacheSalt,
    ModelName,
    TemplateKwargs,
)
from router.frontends.http.responses.input_items import AnyItem, items_size, read_items
from router.frontends.http.responses.text_format import AskedFormat
from router.frontends.http.responses.tools import ToolChoice, Tools, read_choice, read_tools
from router.request.fields import (
    OnlyNeutral,
    RequestModel,
    late,
    limits_of,
    refuse,
    shown,
    unsupported,
    wrong,
)
from router.request.grammar.requested import RequestedGrammar
from router.request.limits import FieldLimits
from router.request.options import (
    AnswerTokens,
    Flag,
    GenerationOptions,
    LogprobCount,
    ReasoningEffort,
    template_effort,
)
from router.request.tools import check_kwargs, tools_size
from router.text.conversation import Conversation

MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # characters
MAX_INCLUDE = 32
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
# What hosted tools and images add to an answer, which has neither, is accepted
_INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED_REASONING,
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)


def _input(value: object, info: ValidationInfo) -> str | list[Any]:
    """Counted only: the items of a long conversation are read on a thread."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("must be text or a non-empty list of items")
    most = limits_of(info).max_model_len
    if len(value) >= most:  # each takes at least a token
        raise wrong(f"{len(value)} items do not fit a context of {most} tokens", most)
    return value


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong("must be an object")
    if len(value) > MAX_METADATA:
        raise wrong(f"at most {MAX_METADATA} entries are allowed", MAX_METADATA)
    for key, text in value.items():
        if not isinstance(text, str):
            raise wrong("its values must be strings")
        if len(key) > MAX_METADATA_KEY or len(text) > MAX_METADATA_VALUE:
            limit = f"{MAX_METADATA_KEY}, {MAX_METADATA_VALUE}"
            raise wrong(
                f"keys have at most {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}", limit
            )
    return value


def _include(value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong("must be a list")
    if len(value) > MAX_INCLUDE:
        raise wrong(f"at most {MAX_INCLUDE} entries are allowed", MAX_INCLUDE)
    for index, one in enumerate(value):
        if one not in _INCLUDABLE:
            raise refuse(f"include[{index}]", f"{shown(one)} is not one of {', '.join(_INCLUDABLE)}")
    return value


def _no_state(value: object) -> None:
    if value is not None:
        raise unsupported("no response is stored here: send the conversation's earlier items in input")


class Reasoning(RequestModel):
    """Other fields change nothing."""

    effort: ReasoningEffort | None = Field(None, description="for chat templates that use it")
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="changes nothing: the reasoning itself is shown"
    )
    generate_summary: Ignored = None


class TextOptions(RequestModel):
    format: AskedFormat = None
    verbosity: Ignored = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Flag = Field(None, description="changes nothing")
    include_usage: Flag = Field(None, description="changes nothing: the last event always has the usage")


_Metadata: TypeAlias = Annotated[
    dict[str, str] | None,
    PlainValidator(_metadata),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_METADATA_KEY},
            "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
        }
    ),
]
_NoState: TypeAlias = Annotated[
    Any, PlainValidator(_no_state), WithJsonSchema({"enum": [None], "description": "not supported"})
]
_Include: TypeAlias = Annotated[
    list[str],
    PlainValidator(_include),
    WithJsonSchema(
        {"type": ["array", "null"], "items": {"enum": list(_INCLUDABLE)}, "maxItems": MAX_INCLUDE}
    ),
]


class ResponseRequest(GenerationOptions):
    model_config = CLOSED
    objects: ClassVar[frozenset[str]] = frozenset({"reasoning", "text", "stream_options"})

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    input: Annotated[
        str | list[Any], PlainValidator(_input, str | Annotated[list[AnyItem], late(minItems=1)])
    ]
    instructions: str | None = Field(None, description="a system's message before the input")
    max_output_tokens: AnswerTokens | None = Field(None, description="reasoning included")
    include: _Include = Field([], description=f"{ENCRYPTED_REASONING}, {LOGPROBS}; others change nothing")
    metadata: _Metadata = Field(None, description="returned with the answer")
    parallel_tool_calls: Flag = Field(None, description="default true")
    reasoning: Reasoning | None = None
    store: Flag = Field(None, description="accepted; nothing is stored, and the answer says false")
    stream: Flag = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    tools: Tools = Field([], description="functions")
    tool_choice: ToolChoice = None
    top_logprobs: LogprobCount | None = Field(None, description=f"needs {LOGPROBS} in include")
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the conversation's oldest turns are left out if it exceeds the context"
    )
    chat_template_kwargs: TemplateKwargs = Field(None, description="variables of the chat template")
    priority: AskedPriority = None
    cache_salt: CacheSalt = None

    previous_response_id: _NoState = None
    conversation: _NoState = None
    background: Annotated[Any, OnlyNeutral(False)] = None
    prompt: Annotated[Any, OnlyNeutral()] = None
    context_management: Annotated[Any, OnlyNeutral([])] = None
    moderation: Annotated[Any, OnlyNeutral()] = None
    n: Annotated[Any, OnlyNeutral(1)] = None
    max_tokens: Annotated[Any, OnlyNeutral()] = None
    logprobs: Annotated[Any, OnlyNeutral(False)] = None
    include_stop_text: Annotated[Any, OnlyNeutral(False)] = None

    access_programs: Ignored = None
    client_metadata: Ignored = None
    image: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    user: Ignored = None

    @property
    def asked_grammar(self) -> RequestedGrammar | None:
        asked = self.text.format if self.text is not None else None
        return (
            None if asked is None or asked.grammar is None else RequestedGrammar("text.format", asked.grammar)
        )

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def alternatives_field(self) -> str:
        return "top_logprobs"

    @property
    def alternatives(self) -> int | None:
        if LOGPROBS in self.include:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise refuse("top_logprobs", f"needs {LOGPROBS} in include")
        return None

    def to_conversation(self, limits: FieldLimits) -> Conversation:
        """Read input and tools. Raises InvalidRequestError or UnsupportedFieldError naming a field."""
        tools, choice, name = read_choice(self.tool_choice, read_tools(self.tools, limits))
        return Conversation(
            read_items(self.input, self.instructions, limits),
            tools,
            choice,
            name,
            self.parallel_tool_calls is not False,
            check_kwargs(self.chat_template_kwargs),
            template_effort(self.reasoning.effort if self.reasoning is not None else None),
        )

    @property
    def size(self) -> int:
        """The cost of rendering it, in characters, before it is read."""
        return items_size(self.input, self.instructions) + tools_size(self.tools)
