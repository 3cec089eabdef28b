"""Grammars of answers that contain calls of tools, and of answers whose constraint begins after the reasoning."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cluster.grammar.library import library_text
from cluster.grammar.spec import GrammarSpec
from router.text.conversation import Tool
from router.text.parsers.base import Reasoning
from router.text.parsers.lark_rules import Marker, Rules, json_rule, quoted
from router.text.parsers.reasoning.gpt_oss import CHANNEL, CONSTRAIN, END, MESSAGE, START
from router.text.parsers.reasoning.think import MAX_GAP
from router.text.parsers.tools import hermes, llama3_json, mistral
from router.text.parsers.tools.json_call import exact_head

MAX_CALLS = 16  # of an answer that must have calls
# Between the end of reasoning and what begins with no line end: the parser leaves out as many.
_GAP = rf'"\n"{{0,{MAX_GAP}}}'
_SHORT_GAP = rf'"\n"{{0,{MAX_GAP - 1}}}'
_WHOLE_GAP = quoted(MAX_GAP * "\n")
_AGAIN = f"{START}assistant"  # begins the next message of an answer in gpt-oss's format
_FINAL = f"{CHANNEL}final{MESSAGE}"


@dataclass(frozen=True)
class _Answer:
    """Rules of answers without a call: of all, and of those that begin with no line end. `bare` is empty where the latter
    have no rule."""

    rule: str
    bare: str

    def behind(self, called: str = "") -> str:
        """The rule behind the reasoning: an answer or what is `called`, and line ends before it. The parser leaves out
        MAX_GAP at most: all of them precede an answer that may begin with one."""
        either, bare = (" | ".join(filter(None, (called, one))) for one in (self.rule, self.bare))
        if self.rule == self.bare:
            return f"{_GAP} ({either})"
        whole = f"{_WHOLE_GAP} ({either})"
        return f"({whole} | {_SHORT_GAP} ({bare}))" if bare else whole


@dataclass(frozen=True)
class _Calls:
    """Requirements on an answer's calls."""

    tools: Sequence[Tool]
    must_call: bool
    parallel: bool
    rules: Rules
    reasoning: Reasoning | None
    answer: _Answer | None = None  # without a call; None = any text is one
    continues: bool = False  # the answer continues the text of a message

    @property
    def bound(self) -> bool:
        """Whether a text that is neither call nor reasoning is no answer."""
        return self.must_call or self.answer is not None

    def start(self, called: str) -> None:
        """Add the first rule where all that is no reasoning is `called`, or the answer."""
        if self.answer is None:
            self.rules.start(called, self.reasoning, behind=f"{_GAP} {called}")
            return
        called = self.rules.add("called", called)
        self.rules.start(
            f"({called} | {self.answer.rule})", self.reasoning, behind=self.answer.behind(called)
        )

    def several(self, call: str, separator: str) -> str:
        """The calls of one answer, one after the other."""
        return f"{call} ({separator} {call}){{0,{MAX_CALLS - 1}}}" if self.parallel else call

    def arguments(self, tool: Tool) -> str:
        """Raises ValueError."""
        return json_rule(_object_of(tool), spaced=True) if self.must_call or tool.strict else _ANY_ARGUMENTS

    def objects(self, arguments: str, space: str = "") -> str:
        """Add the rule of a call as an object with the members `name` and `arguments`."""
        if self.answer:
            head, middle, quote = self.rules.json_head(arguments, spaced=arguments == llama3_json.MEMBER)
        else:
            head = self.rules.add("OBJECT_BEGIN", rf'/{space}\{{"name": ?"/')
            middle, quote = self.rules.add("OBJECT_MIDDLE", rf'/", ?"{arguments}": ?/'), ""
        names = [
            self.rules.add(
                f"call_{index}", f"{quoted(quote + tool.name + quote)} {middle} {self.arguments(tool)}"
            )
            for index, tool in enumerate(self.tools)
        ]
        return self.rules.add("object", f'{head} ({" | ".join(names)}) "}}"')


_ANY_ARGUMENTS = json_rule({"type": "object"}, spaced=True)


def tool_grammar(
    tool_parser: str,
    tools: Sequence[Tool],
    *,
    must_call: bool,
    parallel: bool,
    reasoning: Reasoning | None,
    marker: Marker,
    answer: GrammarSpec | None = None,
    continues: bool = False,
) -> GrammarSpec:
    """Return the grammar of answers with calls of `tools`, in the format that `tool_parser` reads.

    `must_call`: the answer is one call, or with `parallel` up to MAX_CALLS. Otherwise it is a text that may have calls,
    and only the arguments of strict tools match their schemas; with an `answer` it is calls, or matches this. `marker`:
    the form of a marker's text in a grammar, `<[id]>` where it is one token. `continues`: the answer continues the text of
    a message, where the format has messages. Raises ValueError if there is no such grammar.
    """
    if tool_parser not in _FORMATS:
        raise ValueError(f"the calls that {tool_parser} reads have no grammar")
    if not tools:
        raise ValueError("there are no tools to call")
    rules = Rules(marker)
    response = None
    if answer is not None and not must_call:
        begins = _call_begins(tool_parser, tools, marker)
        _check_no_calls(answer, begins, tools)
        response = _add_answer(rules, answer, begins)
    calls = _Calls(tools, must_call, parallel, rules, reasoning, response, continues)
    _FORMATS[tool_parser](calls)
    return rules.spec()


def _call_begins(tool_parser: str, tools: Sequence[Tool], marker: Marker) -> list[str]:
    """The texts with which the parser takes an answer for calls; empty where calls begin with a token that no text has."""
    if tool_parser == "llama3_json":
        return [exact_head(tool.name, llama3_json.MEMBER) for tool in tools]
    begin = hermes.BEGIN if tool_parser == "hermes" else mistral.BEGIN
    return [] if tool_parser == "gpt_oss" or marker(begin).startswith("<[") else [begin]


def _check_no_calls(answer: GrammarSpec, begins: Sequence[str], tools: Sequence[Tool]) -> None:
    """Raise ValueError where answers cannot be told from calls. Compact JSON begins with none of them."""
    if not begins:
        return
    if answer.kind == "choice":
        if called := next((one for one in json.loads(answer.text) if one.startswith(tuple(begins))), None):
            raise ValueError(f"the choice {called[:64]!r} is a call of a tool")
    elif answer.kind == "lark" and any(tool.strict for tool in tools):
        raise ValueError(
            "a grammar in Lark's syntax cannot be told from calls of strict tools; use a JSON schema"
        )


def _add_answer(rules: Rules, spec: GrammarSpec, begins: Sequence[str] = ()) -> _Answer:
    """Add the rules of answers that match `spec`. A regular expression does not match what begins as a call. Raises
    ValueError."""
    if spec.kind == "regex":
        expression = str(json.loads(library_text(spec))["grammars"][0]["lark_grammar"]).removeprefix(
            "start: "
        )
        calls = " | ".join(f"({quoted(one)} ANY)" for one in begins)
        rules.add("EXPRESSION", f"{expression} & ~({calls})" if calls else expression)
        rules.add("BARE", r"EXPRESSION & ~(/\n/ ANY)")
        return _Answer(rules.add("answer", "EXPRESSION"), rules.add("bare", "BARE"))
    answer = rules.add("answer", _nested(spec))
    if spec.kind != "choice":
        return _Answer(answer, answer if spec.kind == "json_schema" or spec.bare else "")
    choices = json.loads(spec.text)
    bare = [one for one in choices if not one.startswith("\n")]
    if len(bare) == len(choices):
        return _Answer(answer, answer)
    return _Answer(answer, rules.add("bare", _nested(GrammarSpec.of_choices(bare))) if bare else "")


def reasoning_grammar(spec: GrammarSpec, reasoning: Reasoning, marker: Marker) -> GrammarSpec:
    """Return the grammar of answers that match `spec` once the reasoning has ended. Raises ValueError."""
    rules = Rules(marker)
    answer = _add_answer(rules, spec)
    if reasoning.begin.startswith(CHANNEL):
        rules.start(f"{rules.marks(_FINAL)} {answer.rule}", reasoning, after=_AGAIN)
    else:
        rules.start(answer.rule, reasoning, behind=answer.behind())
    return rules.spec()


def _nested(spec: GrammarSpec) -> str:
    """A grammar as part of another."""
    if spec.kind == "json_schema":
        schema = json.loads(spec.text)
        return json_rule(schema if isinstance(schema, dict) else {"allOf": [schema]}, spaced=False)
    text = library_text(spec)
    if text.lstrip().startswith("{"):
        raise ValueError("a grammar that is a JSON object cannot follow reasoning; write it in Lark's syntax")
    return f"%lark {{\n{text}\n}}"


def _object_of(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object. Raises ValueError."""
    schema = tool.parameters or {}
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise ValueError(f"the parameters of {tool.name} are not an object")
    return {**schema, "type": "object"}


def _hermes(calls: _Calls) -> None:
    rules = calls.rules
    call = rules.add("call", rf'"\n" {calls.objects("arguments")} "\n" {rules.marks(hermes.END)}')
    if calls.bound:
        marked = rules.add("marked", f"{rules.marks(hermes.BEGIN)} {call}")
        calls.start(calls.several(marked, r'"\n"'))
    else:
        text = rules.without("TEXT", hermes.BEGIN)
        more = "*" if calls.parallel else "?"
        rules.start(f"({rules.until('head', hermes.BEGIN)} {call}){more} {text}", calls.reasoning)


def _mistral(calls: _Calls) -> None:
    rules = calls.rules
    several = calls.several(calls.objects("arguments"), rules.add("COMMA", "/, ?/"))
    listed = rules.add("listed", f'" "? "[" {several} "]"')
    if calls.bound:
        calls.start(f"{rules.marks(mistral.BEGIN)} {listed}")
    else:
        text = rules.without("TEXT", mistral.BEGIN)
        rules.start(f"({text} | {rules.until('head', mistral.BEGIN)} {listed})", calls.reasoning)


def _mistral_args(calls: _Calls, *, call_id: bool = False) -> None:
    """A marker, a name and arguments for each call, as Mistral's models of 2025 write them. `call_id`: an id may be behind
    the name."""
    rules = calls.rules
    body = rules.marks(mistral.ARGUMENTS)
    if call_id:
        body = rules.add("body", f"({rules.marks(mistral.CALL_ID)} /[A-Za-z0-9]{{9}}/)? {body}")
    names = [
        rules.add(f"call_{index}", f"{quoted(tool.name)} {body} {calls.arguments(tool)}")
        for index, tool in enumerate(calls.tools)
    ]
    call = rules.add("call", f"({' | '.join(names)})")
    if calls.bound:
        marked = rules.add("marked", f"{rules.marks(mistral.BEGIN)} {call}")
        calls.start(calls.several(marked, ""))
    else:
        text = rules.without("TEXT", mistral.BEGIN)
        several = rules.add("several", f"{call} ({rules.marks(mistral.BEGIN)} {call})*")
        calls_after = several if calls.parallel else call
        rules.start(f"({text} | {rules.until('head', mistral.BEGIN)} {calls_after})", calls.reasoning)


def _llama3_json(calls: _Calls) -> None:
    rules = calls.rules
    several = calls.several(calls.objects(llama3_json.MEMBER, r"" if calls.bound else r"\s*"), '"; "')
    if calls.bound:
        calls.start(several)
    else:
        begun = r'/\s*\{\s*"(name|parameters|arguments|function|type)"/'
        # The parser takes the members of a call in any order, and escapes in their names.
        named = r'/\s*\{(?s:.*)("name"|\\u00)/'
        text = rules.add("TEXT", f"ANY & ~({begun} ANY) & ~({named} ANY)")
        rules.start(f"({text} | {several})", calls.reasoning)


def _gpt_oss(calls: _Calls) -> None:
    """One call: the model's turn ends with it, as `<|call|>` is one of its end-of-sequence tokens."""
    rules = calls.rules
    body = rules.add("body", rf'" "? {rules.marks(CONSTRAIN)} "json" {rules.marks(MESSAGE)}')
    names = [
        rules.add(f"call_{index}", f"{quoted(tool.name)} {body} {calls.arguments(tool)}")
        for index, tool in enumerate(calls.tools)
    ]
    channel, message = rules.marks(CHANNEL), rules.marks(MESSAGE)
    call = f'{channel} "commentary" " to=functions." ({" | ".join(names)})'
    if calls.continues and calls.must_call:
        raise ValueError("the answer continues a message, which has no calls")
    if calls.continues and calls.answer is not None:
        rules.start(calls.answer.rule, None)
        return
    if calls.bound:  # no notes to the user, which would be content beside the answer
        answer = "" if calls.answer is None else f" | {rules.marks(_FINAL)} {calls.answer.rule}"
        rules.start(f"({call}{answer})", calls.reasoning, after=_AGAIN)
        return
    note = f'{channel} ("analysis" | "commentary") {message} {rules.until("note_text", END)}'
    notes = rules.add("note", f"{note} {rules.marks(_AGAIN)}")
    opened = calls.reasoning if calls.reasoning is not None and calls.reasoning.opened else None
    answer = f"{notes}* ({rules.marks(_FINAL)} ANY | {call})"
    if calls.continues:
        answer = f"(ANY | {rules.until('continued', END)} {rules.marks(_AGAIN)} {answer})"
    rules.start(answer, opened, after=_AGAIN)


def _pythonic(calls: _Calls) -> None:
    raise ValueError(
        "calls in Python's syntax have no grammar of their arguments; answers cannot be held to them"
    )


def has_grammar(tool_parser: str) -> bool:
    return tool_parser in _FORMATS and _FORMATS[tool_parser] is not _pythonic


_FORMATS: Mapping[str, Callable[[_Calls], None]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "mistral_args": _mistral_args,
    "mistral_args_id": partial(_mistral_args, call_id=True),
    "gpt_oss": _gpt_oss,
    "pythonic": _pythonic,
}
