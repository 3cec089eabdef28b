"""The formats of calls and of reasoning that there are parsers for, by name, and how a model's are found."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from router.request.answer_parts import AnswerParser, Part
from router.text.parsers.base import Reasoning, TextParser, ToolFormat
from router.text.parsers.reasoning import gpt_oss, think
from router.text.parsers.stream import Answer, Markers
from router.text.parsers.tools import hermes, llama3_json, mistral, pythonic
from router.text.parsers.tools.calls_or_answer import CallsOrAnswer
from router.text.parsers.tools.plain import Plain

GPT_OSS = "gpt_oss"
# In the order in which they are looked for
_TOOLS: Mapping[str, ToolFormat] = {
    "hermes": hermes.FORMAT,
    "mistral": mistral.FORMAT,
    "llama3_json": llama3_json.FORMAT,
    "pythonic": pythonic.FORMAT,
}
TOOL_PARSERS = (*_TOOLS, GPT_OSS)
REASONING_PARSERS = (*think.MARKERS, GPT_OSS)
_AT_ONCE = 1024  # characters; parsers copy what is behind a marker: quadratic in a piece with many
_ALPHANUMERIC = string.ascii_letters + string.digits


def find_tool_parser(template: str) -> str:
    """The format that a chat template writes; empty if it is none of these."""
    if gpt_oss.CHANNEL in template:
        return GPT_OSS
    for name, one in _TOOLS.items():
        if any(text in template for text in one.in_template):
            return "" if any(text in template for text in one.not_in_template) else name
    return ""


def find_reasoning_parser(template: str) -> str:
    if gpt_oss.CHANNEL in template:
        return GPT_OSS
    return next((name for name, (_, end) in think.MARKERS.items() if end in template), "")


def grammar_form(tool_parser: str, template: str) -> str:
    """The form in which a model writes the calls that `tool_parser` reads, for their grammar."""
    if tool_parser != "mistral" or mistral.ARGUMENTS not in template:
        return tool_parser
    return "mistral_args_id" if mistral.CALL_ID in template else "mistral_args"


def reasoning_texts(parser: str, rendered: str) -> Reasoning | None:
    """The texts around a model's reasoning, for the grammar of what follows. None: an answer to this prompt has none."""
    if parser == GPT_OSS and not gpt_oss.is_in_message(rendered):
        return Reasoning(f"{gpt_oss.CHANNEL}analysis{gpt_oss.MESSAGE}", gpt_oss.END)
    if parser not in think.MARKERS:
        return None
    begin, end = think.MARKERS[parser]
    if rendered.rstrip().endswith(end):
        return None
    return Reasoning(begin, end, opened=opens_reasoning(parser, rendered))


def is_opened(parser: str, rendered: str) -> bool:
    """Whether an answer begins inside a part that the prompt has opened: reasoning, or a message of gpt-oss."""
    return gpt_oss.is_in_message(rendered) if parser == GPT_OSS else opens_reasoning(parser, rendered)


def opens_reasoning(parser: str, rendered: str) -> bool:
    """Whether a prompt ends with the beginning of reasoning, as those of DeepSeek R1 do."""
    return parser in think.MARKERS and rendered[-64:].rstrip().endswith(think.MARKERS[parser][0])


@dataclass(frozen=True)
class AnswerFormat:
    """How the answers to one prompt are parsed. Empty names: without calls, or without reasoning."""

    tool_parser: str
    reasoning_parser: str
    opened: bool
    markers: Markers
    # None: any text may have calls, of any function. Else an answer is calls of these functions as their grammar writes
    # them, or matches a grammar of the request.
    names: frozenset[str] | None = None
    tools: frozenset[str] = frozenset()  # names of the request's functions
    demanded: bool = False  # an answer is calls, and nothing else behind its reasoning
    within: bool = False  # the prompt has opened the reasoning and has some of it: the answer's white space is part of it

    @property
    def name(self) -> str:
        names = "" if self.names is None else "/" + ",".join(sorted(self.names))
        begun = "/within" if self.within else "/opened" if self.opened else ""
        return f"{self.tool_parser}/{self.reasoning_parser}{begun}{names}"

    @property
    def marker_texts(self) -> Mapping[int, str]:
        return self.markers.texts

    def parser(self) -> AnswerParser:
        tools = _TOOLS.get(self.tool_parser)
        answer = Answer(
            _id_maker(tools.id_length if tools is not None else 0),
            self.markers,
            self.names,
            tools=self.tools,
            demanded=self.demanded,
        )
        text_parser: TextParser
        if GPT_OSS in (self.tool_parser, self.reasoning_parser):
            text_parser = gpt_oss.GptOss(
                answer,
                self.markers,
                tools=bool(self.tool_parser),
                reasoning=bool(self.reasoning_parser),
                opened=self.opened,
            )
            return _Parser(answer, self.markers, text_parser)
        text_parser = (tools.make if tools is not None else Plain)(answer, self.markers)
        if tools is not None and tools.opens and self.names is not None:
            text_parser = CallsOrAnswer(answer, self.markers[tools.opens], text_parser)
        if self.reasoning_parser:
            begin, end = (self.markers[one] for one in think.MARKERS[self.reasoning_parser])
            text_parser = think.Think(
                answer,
                begin,
                end,
                text_parser,
                opened=self.opened,
                within=self.within,
                exact=self.names is not None,
            )
        return _Parser(answer, self.markers, text_parser)


def format_of(
    tool_parser: str,
    reasoning_parser: str,
    *,
    opened: bool,
    within: bool = False,
    special: Mapping[str, int],
    names: Iterable[str] | None = None,
    called: Iterable[str] = (),
    demanded: bool = False,
) -> AnswerFormat:
    """`special`: ids of the tokenizer's special tokens by their texts. `names`: of functions, where an answer without
    calls matches a grammar. `called`: names of the request's functions; `demanded`: an answer is calls of them."""
    texts: list[str] = []
    if GPT_OSS in (tool_parser, reasoning_parser):
        texts += gpt_oss.MARKERS
    if tool_parser in _TOOLS:
        texts += _TOOLS[tool_parser].markers
    texts += think.MARKERS.get(reasoning_parser, ())
    return AnswerFormat(
        tool_parser,
        reasoning_parser,
        opened,
        Markers(texts, special),
        None if names is None else frozenset(names),
        frozenset(called),
        demanded,
        within,
    )


def _id_maker(length: int) -> Callable[[], str]:
    if not length:
        return lambda: f"chatcmpl-tool-{secrets.token_hex(16)}"
    return lambda: "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))


class _Parser:
    def __init__(self, answer: Answer, markers: Markers, text_parser: TextParser):
        self._answer, self._markers, self._text_parser = answer, markers, text_parser

    def feed(self, pieces: Sequence[str | int]) -> Sequence[Part]:
        text = self._markers.joined(pieces)
        for begin in range(0, len(text), _AT_ONCE):
            self._text_parser.feed(text[begin : begin + _AT_ONCE])
        return self._answer.taken()

    def end(self, *, cut: bool = False) -> Sequence[Part]:
        self._answer.cut = cut
        self._text_parser.end()
        return self._answer.taken()

    @property
    def called(self) -> bool:
        return self._answer.called

    @property
    def unfinished(self) -> bool:
        return self._answer.unfinished
