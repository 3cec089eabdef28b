"""The formats of a model's answers, by its settings `tool_parser` and `reasoning_parser`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cluster.config.router import RouterConfig
from cluster.errors import ModelError
from cluster.grammar.spec import GrammarSpec
from router.request.answer_plan import Formats
from router.request.completion import ParserSource
from router.text.conversation import Conversation
from router.text.parsers import grammars
from router.text.parsers.base import Reasoning
from router.text.parsers.lark_rules import quoted
from router.text.parsers.reasoning import think
from router.text.parsers.registry import (
    GPT_OSS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_reasoning_parser,
    find_tool_parser,
    format_of,
    grammar_form,
    is_opened,
    reasoning_texts,
)
from router.text.tokenizer import ModelText


def formats_of(settings: RouterConfig, text: ModelText) -> Formats:
    """`settings`: of this model. Raises ModelError for a name that no parser has."""
    template = text.template_source
    tools = _chosen("tool_parser", settings, TOOL_PARSERS, find_tool_parser, template)
    reasoning = _chosen("reasoning_parser", settings, REASONING_PARSERS, find_reasoning_parser, template)
    added = text.tokenizer.get_added_tokens_decoder()
    special = {one.content: token_id for token_id, one in added.items() if one.special}
    made = ModelFormats(tools, reasoning, special, {one.content: token_id for token_id, one in added.items()})
    made.tool_form = grammar_form(tools, template)
    return made


def _chosen(
    setting: str, settings: RouterConfig, names: Sequence[str], find: Callable[[str], str], template: str
) -> str:
    """The parser's name; empty for none."""
    given: str = getattr(settings, setting)
    if given == "auto":
        return find(template)
    if given == "none" or given in names:
        return "" if given == "none" else given
    known = ", ".join(("auto", "none", *names))
    whose = f" of model {settings.served_name!r}" if settings.models else ""
    raise ModelError(f"{setting}{whose}: there is no parser {given!r}; use one of {known}", field=setting)


class ModelFormats:
    """The formats of one model."""

    def __init__(
        self, tool_parser: str, reasoning_parser: str, special: Mapping[str, int], added: Mapping[str, int]
    ):
        """`special`: ids of the tokenizer's special tokens by their texts; `added`: those of all added ones."""
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.tool_form = tool_parser  # for grammars, where one parser reads several
        self._special, self._added = special, added

    @property
    def has_tool_grammar(self) -> bool:
        return grammars.has_grammar(self.tool_form)

    def format(
        self, conversation: Conversation, rendered: str, *, constrained: bool = False
    ) -> ParserSource | None:
        tools = self.tool_parser if conversation.callable else ""
        if not tools and not self.reasoning_parser:
            return None
        opened = is_opened(GPT_OSS if tools == GPT_OSS else self.reasoning_parser, rendered)
        within = not opened and tools != GPT_OSS and self._continues_reasoning(conversation)
        names = [one.name for one in conversation.callable]
        return format_of(
            tools,
            self.reasoning_parser,
            opened=opened or within,
            within=within,
            special=self._special,
            names=names if constrained else None,
            called=names,
            demanded=conversation.must_call,
        )

    def tool_grammar(
        self, conversation: Conversation, rendered: str, answer: GrammarSpec | None
    ) -> GrammarSpec:
        return grammars.tool_grammar(
            self.tool_form,
            conversation.callable,
            must_call=conversation.must_call,
            parallel=conversation.parallel_tool_calls and not conversation.tool_name,
            reasoning=self._reasoning(conversation, rendered),
            marker=self._marker,
            answer=answer,
            continues=self.tool_parser == GPT_OSS and is_opened(GPT_OSS, rendered),
        )

    def reasoning_grammar(self, conversation: Conversation, rendered: str, spec: GrammarSpec) -> GrammarSpec:
        reasoning = self._reasoning(conversation, rendered)
        return spec if reasoning is None else grammars.reasoning_grammar(spec, reasoning, self._marker)

    def _reasoning(self, conversation: Conversation, rendered: str) -> Reasoning | None:
        found = reasoning_texts(self.reasoning_parser, rendered)
        if found is not None and self._continues_reasoning(conversation):
            return replace(found, opened=True)
        return found

    def _continues_reasoning(self, conversation: Conversation) -> bool:
        """Whether the answer continues a message whose content has begun the reasoning, and not ended it. Not where the
        markers are special tokens: their texts within a content are none."""
        if not conversation.continue_final_message or self.reasoning_parser not in think.MARKERS:
            return False
        begin, end = think.MARKERS[self.reasoning_parser]
        last = conversation.messages[-1]
        if last["role"] != "assistant" or begin in self._special:
            return False
        return last["content"].lstrip().startswith(begin) and end not in last["content"]

    def _marker(self, text: str) -> str:
        """In a grammar: the token, or its text."""
        token_id = self._added.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"
