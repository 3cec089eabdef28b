"""Each format's parts, however the text is cut, and in linear time."""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from router.text.parsers.base import Reasoning
from router.text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_reasoning_parser,
    find_tool_parser,
    format_of,
    grammar_form,
    opens_reasoning,
    reasoning_texts,
)
from router.text.parsers.stream import JsonValue

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</x> \\" }"}}\n</tool_call>'
F = ("f", '{"a": "</x> \\" }"}')
OSS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
OSS += '<|constrain|>json<|message|>{"a": 1}<|call|>'
# (tool parser, reasoning parser, opened, text, (reasoning, content, calls))
EXAMPLES: list[tuple[str, str, bool, str, tuple[str, str, list[tuple[str, str]]]]] = [
    ("hermes", "", False, "Hello there.", ("", "Hello there.", [])),
    ("hermes", "", False, f"Let me see.\n\n{CALL}", ("", "Let me see.", [F])),
    ("hermes", "", False, f"{CALL}\n{CALL}\n done", ("", "done", [F, F])),
    ("hermes", "", False, "a <tool_calx> b < c", ("", "a <tool_calx> b < c", [])),
    ("hermes", "", False, "<tool_call>no json</tool_call>", ("", "<tool_call>no json</tool_call>", [])),
    ("hermes", "", False, '<tool_call>{"name": "f", "arg', ("", '<tool_call>{"name": "f", "arg', [])),
    ("hermes", "", False, '<tool_call>{"name": "f", "arguments": {"a"', ("", "", [("f", '{"a"')])),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>',
        ("", "", [("g", '{"a": 1}')]),
    ),
    ("hermes", "", False, '<tool_call>{"name": "f", "arguments": {}</tool_call>x', ("", "x", [("f", "{}")])),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x',
        ("", "x", [("f", '{"a": 1')]),
    ),
    ("hermes", "think", False, f"<think>\nOne\n\ntwo\n</think>\n\n{CALL}", ("One\n\ntwo", "", [F])),
    ("hermes", "think", True, f"One </thin </think>ok {CALL}", ("One </thin", "ok", [F])),
    ("", "think", False, "No <think>thought</think>", ("", "No <think>thought</think>", [])),
    ("", "think", True, "never ends ", ("never ends ", "", [])),
    ("", "think", False, " <thin", ("", " <thin", [])),
    ("llama3_json", "", False, '{"name": "f", "parameters": {"a": 1}}', ("", "", [("f", '{"a": 1}')])),
    (
        "llama3_json",
        "",
        False,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": [1]}}',
        ("", "", [("f", "{}"), ("g", '{"b": [1]}')]),
    ),
    ("llama3_json", "", False, '{"answer": 42}', ("", '{"answer": 42}', [])),
    ("llama3_json", "", False, '{"name": "Al", "age": 5}', ("", '{"name": "Al", "age": 5}', [])),
    ("llama3_json", "", False, '{"id": 7, "name": "Al"}', ("", '{"id": 7, "name": "Al"}', [])),
    ("llama3_json", "", False, '{"parameters": {}, "name": "f"}', ("", "", [("f", "{}")])),
    ("llama3_json", "", False, "Say {} not", ("", "Say {} not", [])),
    (
        "mistral",
        "",
        False,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (
        "mistral",
        "",
        False,
        'Well.[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}',
        ("", "Well.", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    ("mistral", "", False, "[TOOL_CALLS] nothing", ("", "[TOOL_CALLS] nothing", [])),
    (
        "pythonic",
        "",
        False,
        ' [f(a=1, b="x", c=[None, True]), m.g()]',
        ("", "", [("f", '{"a": 1, "b": "x", "c": [null, true]}'), ("m.g", "{}")]),
    ),
    ("pythonic", "", False, "[f(1)]", ("", "[f(1)]", [])),
    ("mistral", "", False, '[TOOL_CALLS] [{"a": 1}]', ("", '[TOOL_CALLS] [{"a": 1}]', [])),
    ("mistral", "", False, "[TOOL_CALLS][ 5, 6] x", ("", "[TOOL_CALLS][ 5, 6] x", [])),
    ("mistral", "", False, "[TOOL_CALLS][", ("", "[TOOL_CALLS][", [])),
    ("mistral", "", False, '[TOOL_CALLS][{"name": "f"', ("", '[TOOL_CALLS][{"name": "f"', [])),
    ("mistral", "", False, '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5] x', ("", "5] x", [("f", "{}")])),
    (
        "mistral",
        "mistral",
        False,
        "[THINK]Hm [ok][/THINK]\n[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}",
        ("Hm [ok]", "", [("f", "{}"), ("g", "{}")]),
    ),
    ("", "mistral", True, "Hm [/THINK]Yes", ("Hm", "Yes", [])),
    (
        "hermes",
        "",
        False,
        '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>x',
        ("", "x", [("f", "{}"), ("g", '{"a": 1}')]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"name": "f", "arguments": {}}{"no": "call"}{"name": "g", "arguments": {}}</tool_call>\n x',
        ("", '{"no": "call"}{"name": "g", "arguments": {}}\n x', [("f", "{}")]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call><tool_call>{"arguments": {}, "name": "g"}, {"name": "h',
        ("", '}, {"name": "h', [("f", "{}"), ("g", "{}")]),
    ),
    ("hermes", "", False, f"{CALL[:-12]}Let me know. <tool_call>{{", ("", "Let me know. <tool_call>{", [F])),
    ("hermes", "", False, f"{CALL[:-13]} \n</tool_call>\n a", ("", "a", [F])),
    ("hermes", "", False, f"{CALL[:-13]}Done.\n", ("", "Done.\n", [F])),
    ("hermes", "", False, f"{CALL[:-13]}, {{1}} </tool_call> b", ("", ", {1}  b", [F])),
    ("hermes", "", False, '<tool_call>{"name": "f", "arguments": {}\nSo', ("", "So", [("f", "{}")])),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"name": "f", "arguments": {}, "x": [1',
        ("", ', "x": [1', [("f", "{}")]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"name": "f", "arguments": {}, so </tool_call>b',
        ("", ", so b", [("f", "{}")]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"x": 1, "name": "f", "arguments": {"a": 1.10}, "id": "}"}</tool_call>',
        ("", "", [("f", '{"a": 1.10}')]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"arguments": {"a":1e400, "b": 1.10,"c":12345678901234567890123}, "name": "g"}',
        ("", "", [("g", '{"a":1e400, "b": 1.10,"c":12345678901234567890123}')]),
    ),
    ("hermes", "", False, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "{}")])),
    ("llama3_json", "", False, '{"name": "f", "parameters": {}\n so', ("", "so", [("f", "{}")])),
    (
        "mistral",
        "",
        False,
        '[TOOL_CALLS][{"name": "f", "arguments": {}, "x": 1',
        ("", ', "x": 1', [("f", "{}")]),
    ),
    ("pythonic", "", False, "[1, 2]", ("", "[1, 2]", [])),
    ("pythonic", "", False, "[f(a=" + "[" * 60, ("", "[f(a=" + "[" * 60, [])),
    ("gpt_oss", "gpt_oss", False, OSS, ("Hm.", "", [("f", '{"a": 1}')])),
    (
        "",
        "gpt_oss",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ("Hm.", "Yes.", []),
    ),
    ("", "gpt_oss", False, "Plain text", ("", "Plain text", [])),
    ("", "gpt_oss", False, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", ("Hm.", "", [])),
    (
        "gpt_oss",
        "gpt_oss",
        False,
        ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "", [("f", '{"a": 1}')]),
    ),
    ("gpt_oss", "", False, "<|start|>" + "word " * 80, ("", "word " * 80, [])),
    ("pythonic", "", False, "[f(a={1, 2})]", ("", "[f(a={1, 2})]", [])),
    ("pythonic", "", False, "[f(), g()(a=1)]", ("", "[f(), g()(a=1)]", [])),
    (
        "pythonic",
        "",
        False,
        "[f(a=1e400, b=1.10, c=-0.50, d={1.10: 0x1f})]",
        ("", "", [("f", '{"a": 1e400, "b": 1.10, "c": -0.50, "d": {"1.1": 31}}')]),
    ),
    (
        "gpt_oss",
        "gpt_oss",
        False,
        "<|channel|>commentary to=browser.search<|message|>{}<|call|>",
        ("", "", [("browser.search", "{}")]),
    ),
    ("pythonic", "", False, '[f(a="\\ud800")]', ("", "", [("f", '{"a": "\\ud800"}')])),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"arguments": {"a": "\\ud83d"}, "name": "f"}</tool_call>',
        ("", "", [("f", '{"a": "\\ud83d"}')]),
    ),
    (
        "hermes",
        "",
        False,
        '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
        ("", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>', []),
    ),
    ("hermes", "", False, "Well \n<tool_call>no</tool_call>", ("", "Well \n<tool_call>no</tool_call>", [])),
    ("hermes", "", False, 'Well \n<tool_call>{"na', ("", 'Well \n<tool_call>{"na', [])),
    ("hermes", "", False, f"{CALL}\n<tool_call>no", ("", "<tool_call>no", [F])),
    ("mistral", "", False, "Well \n[TOOL_CALLS] no", ("", "Well \n[TOOL_CALLS] no", [])),
    ("mistral", "", False, "Well \n[TOOL_CALLS] [no", ("", "Well \n[TOOL_CALLS] [no", [])),
    ("pythonic", "", False, "[f(a='x\\\r\ny')]", ("", "", [("f", '{"a": "xy"}')])),
    ("pythonic", "", False, "[f(a='x\\\ry', b=r'\\\r\n')]", ("", "", [("f", '{"a": "xy", "b": "\\\\\\n"}')])),
    ("pythonic", "", False, "[f(a=true, b=[null])]", ("", "", [("f", '{"a": true, "b": [null]}')])),
    (
        "llama3_json",
        "",
        False,
        '{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}',
        ("", "", [("f", "{}"), ("g", "{}")]),
    ),
]
SPECIAL = {
    text: 100 + number
    for number, text in enumerate(
        ("<tool_call>", "</tool_call>", "<think>", "</think>", "[THINK]", "[/THINK]", "<|python_tag|>",
         "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
         "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")
    )
}  # fmt: skip


def read(parser: Any, pieces: Sequence[str | int]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning, content, ids = "", "", []
    calls: list[tuple[str, str]] = []
    for part in (*(part for piece in pieces for part in parser.feed([piece])), *parser.end()):
        match part:
            case ReasoningText(text):
                assert text
                reasoning += text
            case ContentText(text):
                assert text
                content += text
            case CallBegin(number, call_id, name):
                assert number == len(calls)
                calls.append((name, ""))
                ids.append(call_id)
            case CallArguments(number, text):
                assert text and number == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    assert len(set(ids)) == len(ids) and parser.called == bool(calls)
    return reasoning, content, calls


def made(tools: str, reasoning: str, opened: bool, special: Any = None) -> Any:
    return format_of(tools, reasoning, opened=opened, special=special or {}).parser()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one[0]}{one[1]} {one[3][:24]}")
def test_parts_are_the_same_with_every_cut(example):
    tools, reasoning, opened, text, expected = example
    assert read(made(tools, reasoning, opened), [text]) == expected
    assert read(made(tools, reasoning, opened), list(text)) == expected
    for cut in range(1, len(text)):
        assert read(made(tools, reasoning, opened), [text[:cut], text[cut:]]) == expected


def with_markers(text: str) -> list[str | int]:
    """Every special token as its id."""
    pieces: list[str | int] = [text]
    for marker, token_id in SPECIAL.items():
        split: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, str):
                first, *rest = piece.split(marker)
                split.append(first)
                for one in rest:
                    split += (token_id, one)
            else:
                split.append(piece)
        pieces = [one for one in split if one != ""]
    return pieces


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one[0]}{one[1]} {one[3][:24]}")
def test_markers_may_be_special_tokens_without_text(example):
    tools, reasoning, opened, text, (thought, content, calls) = example
    for marker in SPECIAL:
        content = content.replace(marker, "")
    found = read(made(tools, reasoning, opened, SPECIAL), with_markers(text))
    assert found == (thought, content, calls)


def test_a_spelled_out_special_token_is_no_marker():
    assert read(made("hermes", "", False, SPECIAL), [CALL]) == ("", CALL, [])


@pytest.mark.parametrize("tools", ["", *TOOL_PARSERS])
@pytest.mark.parametrize("reasoning", ["", *REASONING_PARSERS])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_text_has_one_reading(tools, reasoning, data):
    words = [*SPECIAL, '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', "{", "}", "[", "]", '"', ";", ",",
             " " * 70, "\n", "x", "f(a=1)", "to=functions.f", "analysis", "\\\\"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=14)))
    opened = data.draw(st.booleans())
    special = SPECIAL if data.draw(st.booleans()) else {}
    pieces: list[str | int] = with_markers(text) if special else [text]
    whole = read(made(tools, reasoning, opened, special), pieces)
    letters = [one for piece in pieces for one in (piece if isinstance(piece, str) else [piece])]
    assert read(made(tools, reasoning, opened, special), letters) == whole
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=4)))
    if not special:
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(made(tools, reasoning, opened), parts) == whole


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", ["<tool_call>{", "{" * 10, "[" * 10, "<tool_call", '[TOOL_CALLS][{"name"', "<think>", " ", '{"name": "'],
)  # fmt: skip
def test_time_is_linear(tools, text):
    """A bound on processor time, far above what 200 KB take."""
    parser = made(tools, "gpt_oss" if tools == "gpt_oss" else "think", False)
    flood = text * (200_000 // len(text))
    began = time.process_time()
    for begin in range(0, len(flood), 16):
        parser.feed([flood[begin : begin + 16]])
    parser.end()
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("tools", TOOL_PARSERS)
def test_one_long_piece_takes_linear_time_too(tools):
    parser = made(tools, tools if tools == "gpt_oss" else "think", False)
    began = time.process_time()
    parser.feed(["<|start|><tool_call>[TOOL_CALLS][" * 10_000])
    parser.end()
    assert time.process_time() - began < 2.0


def test_templates_tell_formats():
    assert find_tool_parser("… <tool_call>\n{{ … }}") == "hermes"
    assert find_tool_parser("<tool_call>\n<function=") == ""
    assert find_tool_parser("[TOOL_CALLS][") == "mistral"
    assert find_tool_parser("<|python_tag|>") == "llama3_json"
    assert find_tool_parser("plain") == find_reasoning_parser("plain") == ""
    assert find_tool_parser("<|channel|>") == find_reasoning_parser("<|channel|>") == "gpt_oss"
    assert find_reasoning_parser("content.split('</think>')") == "think"
    assert find_reasoning_parser("'[THINK]' + thought + '[/THINK]'") == "mistral"
    assert grammar_form("mistral", "[TOOL_CALLS]' + name + '[ARGS]") == "mistral_args"
    assert grammar_form("mistral", "[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]") == "mistral_args_id"
    assert (
        grammar_form("mistral", "[TOOL_CALLS] [") == "mistral"
        and grammar_form("hermes", "[ARGS]") == "hermes"
    )


def test_a_prompt_may_open_or_close_the_reasoning():
    assert opens_reasoning("think", "<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert reasoning_texts("think", "<think>\n\n</think>\n\n") is None
    found = reasoning_texts("think", "<think>\n")
    assert found is not None and found.opened
    assert reasoning_texts("mistral", "[/INST]") == Reasoning("[THINK]", "[/THINK]")
    assert opens_reasoning("mistral", "[/INST][THINK]") and not opens_reasoning("think", "[THINK]")


def test_ids_of_mistral_are_nine_alphanumerics():
    begin = made("mistral", "", False).feed(['[TOOL_CALLS]f{"a": 1}'])[0]
    assert isinstance(begin, CallBegin) and len(begin.id) == 9 and begin.id.isalnum()


def test_a_flood_of_markers_ends():
    parser = made("gpt_oss", "gpt_oss", False, SPECIAL)
    for _ in range(600):
        parser.feed([SPECIAL["<|start|>"]])
    parser.end()


def test_names_have_no_lone_surrogates():
    found = read(made("hermes", "", False), ['<tool_call>{"name": "a\\udc00", "arguments": {}}</tool_call>'])
    assert found == ("", "", [("a", "{}")])


def test_arguments_come_as_they_are_written():
    parser = made("hermes", "", False)
    parser.feed(['<tool_call>{"name": "f", "arguments": {"a": '])
    assert parser.feed(["[1,"]) == [CallArguments(0, "[1,")]
    assert json.loads('{"a": [1,2]}') == {"a": [1, 2]}


def test_a_long_list_of_calls_is_read_as_it_comes():
    """No piece's work grows with the text before it, and nothing is left for the end: 16 KiB took 40 ms at once."""
    parser, spent = made("pythonic", "", False), []
    text = "[f(a=[" + "[],{'k': 1}, " * 1200 + "])]"
    assert 15_000 < len(text) <= 16_384
    pieces = [text[begin : begin + 256] for begin in range(0, len(text), 256)]
    for work in (*(lambda piece=piece: parser.feed([piece]) for piece in pieces), parser.end):
        began = time.process_time()
        parts = work()
        spent.append(time.process_time() - began)
    assert len(parts) == 2 and len(json.loads(parts[1].text)["a"]) == 2400
    assert sorted(spent)[-3] < 0.01, (
        "far above the 0.5 ms of such a piece: two may meet a collection of garbage"
    )


PYTHON = ("f(", "g(", "a=", "b=", "1", "-", "2.5", '"x"', "'y\\n'", '"""', "[", "]", "(", ")", "{", "}", ", ", ":",
          "True", "null", "0x1f", "1e-5", 'r"\\d"', "u", '"', '""', " ", "c=[1, (2,), {'k': 1,}]",
          "d=(3)", ")]")  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PYTHON), max_size=9))
def test_calls_are_those_of_pythons_own_grammar(words):
    text = "[f(" + "".join(words) + ")]"
    _, content, calls = read(made("pythonic", "", False), [text])
    expected = by_python(text)
    assert content == ("" if expected else text)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == (expected or [])
    assert read(made("pythonic", "", False), list(text)) == ("", content, calls)


def by_python(text: str) -> list[tuple[str, Any]] | None:
    try:
        listed: Any = ast.parse(text.replace("null", "None"), mode="eval").body
        made = []
        for call in listed.elts:
            names = [one.arg for one in call.keywords]
            if call.args or len(set(names)) != len(names):
                return None
            values = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            made.append((ast.unparse(call.func), json.loads(json.dumps(values))))
    except (SyntaxError, TypeError, ValueError, AttributeError):
        return None
    return made if all(name.isidentifier() for name, _ in made) else None


def test_names_of_characters_are_searched_in_linear_time():
    parser = made("pythonic", "", False)
    began = time.process_time()
    parser.feed(['[f(a="' + "\\N{" * 5000 + '")]'])
    parser.end()
    assert time.process_time() - began < 0.02, "quadratic, it took 45 ms"
    assert read(made("pythonic", "", False), ["[f(a='\\N{EURO SIGN}')]"])[2] == [("f", '{"a": "€"}')]


@pytest.mark.parametrize("tools", ["hermes", "llama3_json", "mistral"])
def test_the_head_of_a_call_is_read_once(monkeypatch, tools):
    """Not again from its beginning for each token."""
    seen: list[int] = []
    real = JsonValue.end

    def counted(self, text):
        seen.append(len(text))
        return real(self, text)

    monkeypatch.setattr(JsonValue, "end", counted)
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]["}.get(tools, "")
    head = '{"id": "' + "x" * 900 + '", "name": "f", "parameters": '
    assert read(made(tools, "", False), list(before + head + "{}}"))[2] == [("f", "{}")]
    assert sum(seen) < 2 * len(head)
