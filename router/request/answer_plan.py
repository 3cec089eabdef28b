"""How a conversation is answered: the prompt, the parser of its answers, and the grammar that they match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from cluster.grammar.spec import GrammarSpec
from router.request.completion import ParserSource
from router.request.fields import refuse
from router.request.grammar.requested import RequestedGrammar, json_spec
from router.request.no_parallel_calls import FirstCall
from router.text.conversation import Conversation, Tool

T = TypeVar("T")
CHOICE = "tool_choice"  # the field because of which calls are demanded, and that errors of their whole grammar name


@dataclass(frozen=True)
class AnswerPlan:
    """`format`: None = answers are not parsed. `checks`: grammars to be compiled before the request is sent to workers:
    `grammar`, and before it the schemas in it, which name the part of the request that cannot be compiled."""

    format: ParserSource | None = None
    grammar: RequestedGrammar | None = None
    checks: tuple[RequestedGrammar, ...] = ()


@dataclass(frozen=True)
class ChatPrompt:
    """A prompt or conversation as a request to workers, for Validator.completion. `field`: the client's, which errors
    name."""

    tokens: Sequence[int]
    plan: AnswerPlan = AnswerPlan()
    field: str = "prompt"


class Formats(Protocol):
    """The formats of one model's answers. `tool_parser` and `reasoning_parser` are names; empty = there is none."""

    tool_parser: str
    reasoning_parser: str

    @property
    def has_tool_grammar(self) -> bool:
        """Whether calls of this format have a grammar."""
        ...

    def format(
        self, conversation: Conversation, rendered: str, *, constrained: bool = False
    ) -> ParserSource | None:
        """How the answers to a prompt are parsed, whose text may begin the reasoning. `constrained`: an answer without a
        call matches a grammar of the request."""
        ...

    def tool_grammar(
        self, conversation: Conversation, rendered: str, answer: GrammarSpec | None
    ) -> GrammarSpec:
        """The grammar of answers with the calls that the conversation allows or demands, after reasoning; `answer`: of
        those without a call, if it demands none. Raises ValueError."""
        ...

    def reasoning_grammar(self, conversation: Conversation, rendered: str, spec: GrammarSpec) -> GrammarSpec:
        """The grammar of answers that match `spec` once the reasoning has ended. Raises ValueError."""
        ...


class AnswerPlans:
    """Plans answers for one model. `refusal`: why its requests cannot have a grammar; empty if they can."""

    def __init__(self, formats: Formats, refusal: str):
        self.tool_parser = formats.tool_parser
        self.reasoning_parser = formats.reasoning_parser
        self._formats = formats
        self._refusal = refusal

    def plan(self, conversation: Conversation, rendered: str, asked: RequestedGrammar | None) -> AnswerPlan:
        """`rendered`: the prompt's text. Raises InvalidRequestError."""
        self.check_tools(conversation)
        demanding = _demanding(conversation)
        # Calls, or an answer that matches what was asked for.
        either = asked is not None and bool(conversation.callable) and self._formats.has_tool_grammar
        constrained = asked is not None and not conversation.must_call
        parsed = self._formats.format(conversation, rendered, constrained=constrained)
        if parsed is not None and not conversation.parallel_tool_calls:
            parsed = FirstCall(parsed)
        if demanding or (either and not self._refusal):
            return self._with_tool_grammar(conversation, rendered, asked, demanding, parsed)
        if asked is None:
            return AnswerPlan(parsed)
        if not self._refusal and self.reasoning_parser:
            spec = self._made(
                asked.field,
                lambda: self._formats.reasoning_grammar(conversation, rendered, asked.spec),
            )
            whole = RequestedGrammar(asked.field, spec)
            return AnswerPlan(parsed, whole, (asked, whole) if spec != asked.spec else (asked,))
        return AnswerPlan(parsed, asked, (asked,))

    def check_tools(self, conversation: Conversation) -> None:
        """Raises InvalidRequestError where no answer can have the calls that it may have, or must."""
        if conversation.callable and not self.tool_parser:
            raise UnsupportedFieldError(
                "tools: no parser is known for this model's calls; the router's setting tool_parser names one",
                field="tools",
            )
        if conversation.must_call and not conversation.callable:
            raise refuse("tool_choice", "a call is required, but there are no tools")

    def _with_tool_grammar(
        self,
        conversation: Conversation,
        rendered: str,
        asked: RequestedGrammar | None,
        demanding: str,
        parsed: ParserSource | None,
    ) -> AnswerPlan:
        name = demanding or (asked.field if asked is not None else "")
        if self._refusal:
            raise UnsupportedFieldError(
                f"{name}: this model has no structured output: {self._refusal}", field=name
            )
        answer = None if asked is None else asked.spec
        spec = self._made(name, lambda: self._formats.tool_grammar(conversation, rendered, answer))
        schemas = self._made(name, lambda: _schemas(conversation))
        whole = RequestedGrammar(name, spec)
        parts = () if asked is None else (asked,)
        return AnswerPlan(parsed, whole, (*parts, *schemas, whole))

    @staticmethod
    def _made(name: str, make: Callable[[], T]) -> T:
        try:
            return make()
        except InvalidRequestError as error:  # of the library's form of a grammar
            raise refuse(name, error.message.removeprefix("grammar: ")) from None
        except ValueError as error:
            raise refuse(name, str(error)) from None


def _demanding(conversation: Conversation) -> str:
    """The field because of which calls must match a grammar; empty = they need not."""
    if conversation.must_call:
        return CHOICE
    strict = [one for one in conversation.callable if one.strict]
    return f"{_function_field(strict[0], conversation.tools.index(strict[0]))}.strict" if strict else ""


def _function_field(tool: Tool, index: int) -> str:
    """`index`: among the tools of the conversation, which may be some of the request's."""
    return f"tools[{index if tool.place is None else tool.place}].function"


def parameters_field(tool: Tool, index: int) -> str:
    """The name, in errors, of the schema of the tool at `index` of its conversation."""
    return f"{_function_field(tool, index)}.parameters"


def _schemas(conversation: Conversation) -> list[RequestedGrammar]:
    """Schemas of the arguments that a grammar contains. Raises ValueError."""
    wanted = {tool.name for tool in conversation.callable}  # a Tool compares its whole schema
    return [
        RequestedGrammar(parameters_field(tool, index), json_spec(tool.parameters))
        for index, tool in enumerate(conversation.tools)
        if tool.parameters is not None and tool.name in wanted and (conversation.must_call or tool.strict)
    ]
