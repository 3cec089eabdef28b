"""Each format's parts, however the text is cut, and in linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.request.answer_parts import CallArguments, CallBegin, ContentText, is_called
from router.text.parsers.base import Reasoning
from router.text.parsers.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_reasoning_parser,
    find_tool_parser,
    grammar_form,
    opens_reasoning,
    reasoning_texts,
)
from router.text.parsers.stream import MAX_HEAD
from router.text.parsers.tools.pythonic import MAX_CALLS_TEXT
from tests.router.text.parsers.examples import CALL, CALLS, CUT, EXAMPLES, OSS
from tests.router.text.parsers.parsed_answers import SPECIAL, made, read, with_markers


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one[0]}{one[1]} {one[3][:24]}")
def test_parts_are_the_same_with_every_cut(example):
    tools, reasoning, opened, text, expected = example
    assert read(made(tools, reasoning, opened), [text]) == expected
    assert read(made(tools, reasoning, opened), list(text)) == expected
    for cut in range(1, len(text)):
        assert read(made(tools, reasoning, opened), [text[:cut], text[cut:]]) == expected


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


def test_names_have_no_lone_surrogates():
    found = read(made("hermes", "", False), ['<tool_call>{"name": "a\\udc00", "arguments": {}}</tool_call>'])
    assert found == ("", "", [("a", "{}")])


@pytest.mark.parametrize("name", ["", "a\\nb", "\\ud800"])
def test_what_has_no_name_is_no_call(name):
    """Else the history, in which a call has a name, would be refused."""
    for tools, text in (
        ("hermes", f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'),
        ("llama3_json", f'{{"name": "{name}", "parameters": {{}}}}'),
        ("mistral", f'[TOOL_CALLS][{{"name": "{name}", "arguments": {{}}}}]'),
    ):
        assert read(made(tools, "", False), [text]) == ("", text, [])
        assert read(made(tools, "", False), list(text)) == ("", text, [])


@pytest.mark.parametrize("tools", TOOL_PARSERS)
@settings(max_examples=40, deadline=None)
@given(name=st.text(max_size=1100), member=st.sampled_from(["arguments", "parameters"]))
def test_every_name_of_a_call_may_be_in_the_history(tools, name, member):
    written = json.dumps({"name": name, member: {}}, ensure_ascii=False)
    begin = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]["}.get(tools, "")
    other = f"[TOOL_CALLS]{name}{{}}" if tools == "mistral" else f"[{name}(a=1)]"
    header = f"<|channel|>commentary to=functions.{name} <|message|>{{}}<|call|>"
    for text in (begin + written, header if tools == "gpt_oss" else other):
        _, _, calls = read(made(tools, "", False), [text])
        assert all(is_called(one) for one, _ in calls)


def test_arguments_come_as_they_are_written():
    parser = made("hermes", "", False)
    parser.feed(['<tool_call>{"name": "f", "arguments": {"a": '])
    assert parser.feed(["[1,"]) == [CallArguments(0, "[1,")]
    assert parser.feed(["2]} }"]) == [CallArguments(0, "2]}")]


@pytest.mark.parametrize(
    ("tools", "head", "arguments", "tail"),
    [
        *(
            (tools, f'{begin}{{"name": "f", "{member}": ', arguments, "}")
            for tools, begin, member in [
                ("hermes", "<tool_call>", "arguments"),
                ("mistral", "[TOOL_CALLS][", "arguments"),
                ("llama3_json", "", "parameters"),
            ]
            for arguments in ('{"a": [{}]}', "5", "null", '"}"')
        ),
        ("mistral", "[TOOL_CALLS]f[ARGS]", '{"a": "}"}', " "),
        ("gpt_oss", OSS[: OSS.index("{")], '{"a": 1}', " "),
    ],
)
def test_a_call_is_unfinished_until_its_arguments_have_ended(tools, head, arguments, tail):
    whole = head + arguments + tail
    for size in (1, 7, len(whole)):
        parser = made(tools, "", False)
        for place in range(0, len(whole), size):
            parser.feed([whole[place : place + size]])
        assert parser.called and not parser.unfinished
    cut = made(tools, "", False)
    cut.feed([head + arguments[:-1]])
    assert cut.called and cut.unfinished


def test_arguments_that_a_marker_cuts_are_unfinished():
    marked = '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>'
    for tools, text in (("hermes", marked), ("gpt_oss", OSS.replace("1}", "1"))):
        parser = made(tools, "", False)
        parser.feed([text])
        assert parser.called and parser.unfinished


def test_an_object_within_a_call_is_not_the_calls_end():
    """A marker ends what was never closed."""
    tail = ', "more": {"b": 1}'
    text = f'<tool_call>{{"name": "f", "arguments": {{}}{tail}</tool_call>x'
    for pieces in ([text], list(text)):
        assert read(made("hermes", "", False), pieces) == ("", f"{tail}x", [("f", "{}")])


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("demanded", [False, True], ids=["auto", "required"])
@pytest.mark.parametrize("example", CALLS, ids=lambda one: f"{one[0]} {one[2][:24]}")
def test_a_cut_call_is_no_content(example, special, demanded):
    """Wherever it is cut: the calls before it, and of the last one the name and the beginning of its arguments."""
    tools, reasoning, text, calls = example
    pieces = [one for piece in (with_markers(text) if special else [text])
              for one in (piece if isinstance(piece, str) else [piece])]  # fmt: skip
    opens = next(
        (one for one in ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<|channel|>") if one in text), ""
    )
    opens = "to=" if text.lstrip().startswith("to=") else opens
    begun = -1
    for length in range(len(pieces) + 1):
        parser = made(
            tools, reasoning, False, SPECIAL if special else {}, called=["f", "g"], demanded=demanded
        )
        _, content, found = read(parser, pieces[:length], cut=True)
        # A marker that is spelled out is content until it is whole, where the answer may be something else
        if found or demanded or not (opens and opens.startswith(content.strip())):
            assert content.strip() == "" or (reasoning and "<think>".startswith(content)), content
        assert [name for name, _ in found] == [name for name, _ in calls[: len(found)]]
        assert found[:-1] == calls[: len(found)][:-1]
        if found:
            assert calls[len(found) - 1][1].startswith(found[-1][1])
        assert len(found) >= begun, "a call that has begun is not taken back"
        begun = len(found)
    assert found == calls


@pytest.mark.parametrize("example", CUT, ids=lambda one: f"{one[0]} {one[1][:24]}")
def test_what_a_cut_answer_shows(example):
    tools, text, (content, calls) = example
    for pieces in ([text], list(text)):
        found = read(made(tools, "", False, called=["f", "g"]), pieces, cut=True)
        assert found == ("", content, calls)


def test_a_demanded_call_is_no_content_from_its_first_character():
    for text in ("<", "<tool", "<tool_call", "{", "[TOOL"):
        for tools in ("hermes", "mistral", "llama3_json"):
            parser = made(tools, "", False, called=["f"], demanded=True)
            if text[0] == {"hermes": "<", "mistral": "[", "llama3_json": "{"}[tools]:
                assert read(parser, [text], cut=True) == ("", "", [])


def test_reasoning_that_is_cut_in_its_marker_is_no_answer_of_a_grammar():
    for text in ("<", "<thi", " <think"):
        for bound in ({"names": ["f"]}, {"demanded": True}):
            assert read(made("hermes", "think", False, **bound), [text], cut=True) == ("", "", [])
        assert read(made("hermes", "think", False), [text], cut=True) == ("", text, [])


def test_a_name_that_is_longer_than_a_head_is_no_call():
    """Whether it comes whole or in pieces."""
    text = "[TOOL_CALLS]" + "f" * (MAX_HEAD + 10) + '{"a": 1}'
    for pieces in ([text], list(text)):
        assert read(made("mistral", "", False), pieces) == ("", text, [])


def test_members_behind_arguments_are_held_up_to_a_bound():
    parser = made("hermes", "", False)
    parser.feed(['<tool_call>{"name": "f", "arguments": {}, "x": "'])
    assert not parser.feed(["y" * (MAX_HEAD // 2)])
    assert [type(one) for one in parser.feed(["y" * MAX_HEAD])] == [ContentText]


def test_calls_in_python_are_held_up_to_a_bound():
    parser = made("pythonic", "", False)
    assert not parser.feed(["[f(a='" + (MAX_CALLS_TEXT // 2) * "x"])
    assert {type(one) for one in parser.feed([(MAX_CALLS_TEXT // 2) * "x"])} == {ContentText}
