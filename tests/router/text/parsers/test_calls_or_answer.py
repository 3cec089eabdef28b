"""Beside a response format, calls are read only as their grammar writes them; all else is the answer, to the letter."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from cluster.grammar.spec import GrammarSpec
from router.request.answer_formats import ModelFormats
from router.text.conversation import Conversation, Tool
from router.text.parsers.base import Reasoning
from router.text.parsers.grammars import reasoning_grammar, tool_grammar
from router.text.parsers.registry import format_of, reasoning_texts
from tests.router.text.parsers.grammar_texts import Matched
from tests.router.text.parsers.parsed_answers import read, read_parts

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
STRICT = [Tool("f", None, SCHEMA, strict=True)]
ANY = GrammarSpec("json_schema", '{"type":"object"}')
THINK = Reasoning("<think>", "</think>", opened=False)
FINAL, CALLING = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f<|message|>"


@pytest.fixture(scope="module")
def matched(tmp_path_factory):
    return Matched(tmp_path_factory.mktemp("model"), tokens=False)


def either(matched, parser, answer, **more):
    fields = {"must_call": False, "parallel": True, "reasoning": None, "marker": matched.marker, **more}
    return tool_grammar(parser, fields.pop("tools", STRICT), answer=answer, **fields)


def parsed(parser, text, reasoning="", opened=False):
    source = format_of(parser, reasoning, opened=opened, special={}, names=["f"])
    whole = read_parts(source.parser(), [text])
    assert read_parts(source.parser(), list(text)) == whole
    return whole


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        ("llama3_json", '{"name":"f","parameters":{"b":1}}'),
        ("llama3_json", '{"parameters":{"b":1},"name":"f"}'),
        ("hermes", '{"x":"<tool_call>","y":1}'),
        ("mistral", '{"x":"[TOOL_CALLS]f{\\"b\\":1}"}'),
        ("mistral_args", '{"x":"[TOOL_CALLS]f[ARGS]{"}'),
    ],
)
def test_no_answer_in_json_is_a_call(matched, parser, answer):
    assert matched.accepts(either(matched, parser, ANY), answer)
    assert parsed(parser.removesuffix("_args"), answer) == ([], answer)


def test_calls_of_strict_tools_match_beside_any_object(matched):
    spec = either(matched, "llama3_json", ANY)
    call = '{"name": "f", "parameters": {"a": 1}}'
    assert matched.accepts(spec, call) and parsed("llama3_json", call) == ([("f", '{"a": 1}')], "")
    assert not matched.accepts(spec, call.replace('"a"', '"b"'))


@pytest.mark.parametrize("parser", ["llama3_json", "hermes", "mistral"])
def test_an_answer_by_an_expression_is_no_call(matched, parser):
    loose = {
        "llama3_json": '{"name": "f", "parameters": {"b": 1}}',
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"b": 1}}]',
    }[parser]
    spec = either(matched, parser, GrammarSpec("regex", "(?s:.*)"))
    assert not matched.accepts(spec, loose)
    for text in ("Hi", " " + loose, "", loose[:9]):
        assert matched.accepts(spec, text) and parsed(parser, text) == ([], text)
    with pytest.raises(ValueError, match="is a call"):
        either(matched, parser, GrammarSpec.of_choices(["yes", loose]))
    lark = GrammarSpec("lark", "start: /a+/")
    with pytest.raises(ValueError, match="Lark"):
        either(matched, parser, lark)
    assert matched.accepts(either(matched, parser, lark, tools=[Tool("f", None, SCHEMA)]), "aa")


@pytest.mark.parametrize("parser", ["", "hermes", "llama3_json"])
def test_white_space_behind_reasoning_is_the_answers(matched, parser):
    for gap in ("", "\n", "\n\n"):
        for text in ('{"a":1}', ' {"a":1} ', "\t\n"):
            assert parsed(parser, f"<think>Hm</think>{gap}{text}", "think") == ([], text)
    text = "\n\n x "
    assert parsed(parser, f"<think>Hm</think>\n\n{text}", "think") == ([], text)


@pytest.mark.parametrize("parser", ["", "hermes", "llama3_json"])
@pytest.mark.parametrize(
    ("answer", "expression", "texts"),
    [
        (GrammarSpec("regex", r"\n\nx|x ?| \n*x"), r"\n\nx|x ?| \n*x", ["x", " \nx", "\n\nx"]),
        (GrammarSpec("regex", r"\s*"), r"\s*", ["", " \n", "\n"]),
        (GrammarSpec.of_choices(["\nx", "x", " x"]), r"\nx| ?x", ["x", " x", "\nx"]),
        (GrammarSpec.of_choices(["\nx"]), r"\nx", ["\nx"]),
        (GrammarSpec("lark", 'start: "\\n"? "x"'), r"\n?x", ["\nx", "x"]),
    ],
    ids=["expression", "white space", "choices", "choice", "lark"],
)
def test_answers_behind_reasoning_match_without_the_gap(matched, parser, answer, expression, texts):
    """Whatever of the line ends behind the reasoning the parser takes for the gap; models write two, one or none."""
    tools = [Tool("f", None, SCHEMA)]
    either_of = either(matched, parser, answer, reasoning=THINK, tools=tools) if parser else None
    spec = either_of or reasoning_grammar(answer, THINK, matched.marker)
    for length in range(6):
        for letters in itertools.product("\n x", repeat=length):
            text = "<think>Hm</think>" + "".join(letters)
            if matched.accepts(spec, text):
                calls, content = parsed(parser, text, "think")
                assert not calls and re.fullmatch(expression, content), (text, content)
    for one in texts:
        any_gap = answer.kind != "lark" and not one.startswith("\n")
        for gap in ("", "\n", "\n\n") if any_gap else ("\n\n",):
            assert matched.accepts(spec, f"<think>Hm</think>{gap}{one}"), (gap, one)
        assert matched.accepts(spec, one), "without reasoning"


def test_an_answer_goes_on_in_a_message_of_gpt_oss(matched):
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>So"
    assert reasoning_texts("gpt_oss", prompt) is None
    assert reasoning_texts("gpt_oss", "<|start|>assistant") is not None
    ended = f"{prompt}<|return|><|start|>assistant"
    assert reasoning_texts("gpt_oss", ended) is not None
    formats = ModelFormats("gpt_oss", "gpt_oss", {}, {})
    assert formats.reasoning_grammar(Conversation([]), prompt, ANY) == ANY
    conversation = Conversation([], STRICT)
    spec = formats.tool_grammar(conversation, prompt, ANY)
    assert matched.accepts(spec, '{"x":"<|end|>"}') and not matched.accepts(spec, FINAL + "{}")
    source = formats.format(conversation, prompt, constrained=True)
    assert source is not None and read_parts(source.parser(), ['{"x":"<|end|>"}']) == ([], '{"x":"<|end|>"}')
    free = formats.tool_grammar(conversation, prompt, None)
    called = f" it.<|end|><|start|>assistant{CALLING.replace('<|message|>', ' <|constrain|>json<|message|>')}"
    assert matched.accepts(free, " it.") and matched.accepts(free, called + '{"a":1}')
    assert not matched.accepts(free, called + '{"b":1}')
    source = formats.format(conversation, prompt)
    assert source is not None
    assert read_parts(source.parser(), list(called + '{"a":1}')) == ([("f", '{"a":1}')], " it.")
    with pytest.raises(ValueError, match="continues a message"):
        formats.tool_grammar(Conversation([], STRICT, "required"), prompt, None)


def test_a_final_message_of_an_answer_by_a_grammar_ends_with_it():
    text = json.dumps({"x": f"<|end|><|start|>assistant{CALLING}"})
    assert parsed("gpt_oss", FINAL + text, "gpt_oss") == ([], text)


@pytest.mark.parametrize(("name", "calls"), [("f", [("f", "")]), ("g", [])])
def test_a_cut_answer_beside_a_grammar_calls_the_requests_functions_only(name, calls):
    parser = format_of("mistral", "", opened=False, special={}, names=["f"]).parser()
    assert read(parser, [f"[TOOL_CALLS]{name}[ARGS]"], cut=True) == ("", "", calls)
