"""Requests as Anthropic's clients send them. Messages are counted here and read by blocks.py."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PlainValidator
from pydantic.json_schema import WithJsonSchema

from cluster.grammar.spec import GrammarSpec
from router.frontends.http.anthropic.blocks import (
    MessageParam,
    TextBlock,
    WrittenInputs,
    messages_size,
    read_messages,
)
from router.frontends.http.anthropic.tools import (
    ToolChoiceParam,
    Tools,
    check_choice,
    read_tools,
)
from router.frontends.http.openai.grammar_fields import schema_grammar
from router.frontends.http.openai.neutral_fields import Ignored
from router.frontends.http.openai.requests import (
    CLOSED,
    MODEL_DESCRIPTION,
    AskedPriority,
    CacheSalt,
    ModelName,
    counted_messages,
)
from router.request.fields import OnlyNeutral, RequestModel, Within, late, unsupported, wrong
from router.request.grammar.requested import RequestedGrammar
from router.request.limits import FieldLimits
from router.request.options import Flag, GenerationOptions, StopStrings, template_effort
from router.request.tools import tools_size
from router.text.conversation import Conversation, ToolChoice

_CHOICES: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "auto", "none": "none"}
MAX_TOKENS = 2**31  # that a request may ask for: more than any context
# The variables by which chat templates turn reasoning on and off; a template that uses none ignores them
_THINKING_KWARGS = ("enable_thinking", "thinking")


def _system(value: object) -> Any:
    if not isinstance(value, str | list | None):
        raise wrong("must be text or a list of text blocks")
    return value


def _format(value: object) -> GrammarSpec | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise unsupported("its type must be json_schema")
    return schema_grammar({name: one for name, one in value.items() if name != "type"}, "")


_Format: TypeAlias = Annotated[
    GrammarSpec | None,
    PlainValidator(_format),
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "properties": {"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}},
            "required": ["type", "schema"],
        }
    ),
]


def _no_thread(value: object) -> None:
    if value is not None:
        raise unsupported("no conversation is stored here: send all its messages")


class ThinkingParam(RequestModel):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, late(minimum=1)] | None = Field(
        None, description="accepted, changes nothing"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks are empty"
    )


class OutputConfig(RequestModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="for chat templates that use a reasoning effort"
    )
    format: _Format = None


class ConversationFields(RequestModel):
    """The fields of both endpoints."""

    model: ModelName = Field("", description=MODEL_DESCRIPTION)
    messages: Annotated[
        list[Any], PlainValidator(counted_messages, Annotated[list[MessageParam], late(minItems=1)])
    ]
    system: Annotated[Any, PlainValidator(_system, str | list[TextBlock] | None)] = None
    tools: Tools = Field([], description="with an input_schema each")
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = Field(
        None,
        description="sets the template's enable_thinking and thinking; between_tools: as disabled, adaptive: its default",
    )
    output_config: OutputConfig | None = None

    billing_policy: Ignored = None
    cache_control: Ignored = None
    context_management: Ignored = None
    user_profile_id: Ignored = None
    mcp_servers: Annotated[Any, OnlyNeutral([])] = None
    container: Annotated[Any, OnlyNeutral()] = None

    @property
    def size(self) -> int:
        """Rendering cost, in characters; counting stops at the limit."""
        return messages_size(self.messages, self.system) + tools_size(self.tools)

    def conversation(self, limits: FieldLimits, inputs: WrittenInputs | None = None) -> Conversation:
        """`inputs`: of its calls. Raises InvalidRequestError or UnsupportedFieldError naming a place."""
        tools, choice = read_tools(self.tools, limits), self.tool_choice
        messages = read_messages(self.messages, self.system, limits, inputs)
        continues = messages[-1]["role"] == "assistant"
        effort = self.output_config.effort if self.output_config is not None else None
        return Conversation(
            messages,
            tools,
            "auto" if choice is None else _CHOICES[choice.type],
            check_choice(choice, tools),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            template_kwargs=self._template_kwargs(),
            reasoning_effort=template_effort(effort),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )

    def _template_kwargs(self) -> dict[str, bool]:
        if self.thinking is None or self.thinking.type == "adaptive":
            return {}
        return dict.fromkeys(_THINKING_KWARGS, self.thinking.type == "enabled")


class MessagesRequest(ConversationFields, GenerationOptions):
    model_config = CLOSED
    objects: ClassVar[frozenset[str]] = frozenset({"tool_choice", "thinking", "output_config"})

    max_tokens: Annotated[int, Within(0, MAX_TOKENS)] = Field(
        description="0: the prompt alone is computed and cached; an answer also ends where the context is full"
    )
    stop: StopStrings | None = Field(None, alias="stop_sequences")
    stream: Flag = None
    priority: AskedPriority = None
    cache_salt: CacheSalt = None

    n: Annotated[Any, OnlyNeutral(1)] = None
    logprobs: Annotated[Any, OnlyNeutral(False)] = None
    include_stop_text: Annotated[Any, OnlyNeutral(False)] = None

    metadata: Ignored = None
    service_tier: Ignored = None
    # Known, so that it is refused by routers that ignore unknown fields too: a request that continues a thread has a part
    # of its messages
    thread: Annotated[
        Any, PlainValidator(_no_thread), WithJsonSchema({"enum": [None], "description": "not supported"})
    ] = None
    compaction: Annotated[Any, OnlyNeutral()] = None
    diagnostics: Ignored = None
    fallback_credit_token: Ignored = None
    fallbacks: Ignored = None  # no answer is declined
    inference_geo: Ignored = None
    speed: Ignored = None

    @property
    def asked_grammar(self) -> RequestedGrammar | None:
        asked = self.output_config.format if self.output_config is not None else None
        return None if asked is None else RequestedGrammar("output_config.format", asked)

    @property
    def fewest_tokens(self) -> int:
        return 0

    @property
    def alternatives(self) -> int | None:
        return None

    def filling_context(self) -> MessagesRequest:
        """The request for an answer of as many tokens as the context leaves."""
        return self.model_copy(update={"max_tokens": None})

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"


class CountTokensRequest(ConversationFields):
    model_config = CLOSED
    objects: ClassVar[frozenset[str]] = MessagesRequest.objects

    compaction: Ignored = None
    diagnostics: Ignored = None
    speed: Ignored = None
