"""Answers that must contain calls match grammars of the model's format, behind its reasoning."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from cluster.grammar.spec import MAX_GRAMMAR_CHOICES, GrammarSpec
from router.text.conversation import Tool
from router.text.parsers.base import Reasoning
from router.text.parsers.grammars import MAX_CALLS, reasoning_grammar, tool_grammar
from router.text.parsers.registry import format_of
from tests.router.text.parsers.grammar_texts import MARKERS, Matched
from tests.router.text.parsers.parsed_answers import read_parts, with_ids

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city"],
    "additionalProperties": False,
}
FLAG = {"properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
TOOLS = [Tool("weather", None, WEATHER), Tool("weather_flag", None, FLAG)]
THINK = Reasoning("<think>", "</think>", opened=False)
OPENED = Reasoning("<think>", "</think>", opened=True)
HARMONY = Reasoning("<|channel|>analysis<|message|>", "<|end|>", opened=False)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
FLAG_CALL = '<tool_call>\n{"name":"weather_flag","arguments":{"on":true}}\n</tool_call>'
FORMATS = ["hermes", "llama3_json", "mistral", "mistral_args", "mistral_args_id", "gpt_oss"]


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def matched(request, tmp_path_factory):
    return Matched(tmp_path_factory.mktemp("model"), tokens=request.param)


def grammar(matched, parser="hermes", tools=TOOLS, *, must=True, parallel=False, reasoning=None):
    return tool_grammar(
        parser, tools, must_call=must, parallel=parallel, reasoning=reasoning, marker=matched.marker
    )


VALID = {
    "hermes": (CALL, FLAG_CALL),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        '{"name":"weather_flag","parameters":{"on":false}}',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
        '[TOOL_CALLS] [{"name": "weather_flag", "arguments": {"on": true}}]',
    ),
    "mistral_args": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        '[TOOL_CALLS]weather_flag[ARGS]{"on": true}',
    ),
    "mistral_args_id": (
        '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}',
        '[TOOL_CALLS]weather_flag[ARGS]{"on": true}',
    ),
    "gpt_oss": (
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}',
        '<|channel|>commentary to=functions.weather_flag <|constrain|>json<|message|>{"on": true}',
    ),
}


@pytest.mark.parametrize("parser", FORMATS)
def test_one_call_is_demanded_in_the_format_of_the_model(matched, parser):
    spec = grammar(matched, parser)
    for call in VALID[parser]:
        assert matched.accepts(spec, call)
        assert not matched.accepts(spec, "Well: " + call) and not matched.accepts(spec, call + " Done.")
        assert not matched.accepts(spec, call + call) and not matched.accepts(spec, call + "\n" + call)
    first = VALID[parser][0]
    assert not matched.accepts(spec, first.replace("weather", "weathers"))
    assert not matched.accepts(spec, first.replace("weather", "weathe"))
    assert not matched.accepts(spec, first.replace('"Rome"', "7"))
    assert not matched.accepts(spec, first.replace('"city"', '"town"'))
    assert not matched.accepts(spec, "") and not matched.accepts(spec, "{}")


@pytest.mark.parametrize(
    ("parser", "two"),
    [
        ("hermes", f"{CALL}\n{FLAG_CALL}"),
        ("llama3_json", "; ".join(VALID["llama3_json"])),
        ("mistral_args", "".join(VALID["mistral_args"])),
        ("mistral", VALID["mistral"][0][:-1] + ", " + VALID["mistral"][1][len("[TOOL_CALLS] [") :]),
    ],
)
def test_several_calls_where_they_may_be_parallel(matched, parser, two):
    assert matched.accepts(grammar(matched, parser, parallel=True), two)
    assert not matched.accepts(grammar(matched, parser), two)


def test_the_number_of_demanded_calls_has_a_bound(matched):
    spec = grammar(matched, parallel=True)
    assert matched.accepts(spec, "\n".join([FLAG_CALL] * MAX_CALLS))
    assert not matched.accepts(spec, "\n".join([FLAG_CALL] * (MAX_CALLS + 1)))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_mask_allows_ends_in_valid_calls(matched, seed):
    ended = matched.walk(grammar(matched, parallel=True), seed)
    assert ended is not None
    calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", ended)
    assert 1 <= len(calls) <= MAX_CALLS
    for call in map(json.loads, calls):
        jsonschema.validate(call["arguments"], {"weather": WEATHER, "weather_flag": FLAG}[call["name"]])


def test_a_tool_without_parameters_takes_an_object(matched):
    spec = grammar(matched, tools=[Tool("now")])
    now = '<tool_call>\n{"name": "now", "arguments": %s}\n</tool_call>'
    assert matched.accepts(spec, now % "{}") and matched.accepts(spec, now % '{"a": [1, {"b": null}]}')
    assert not matched.accepts(spec, now % "[]") and not matched.accepts(spec, now % "3")


def test_reasoning_is_in_front_of_a_demanded_call(matched):
    spec = grammar(matched, reasoning=THINK)
    thought = "<think>Is {it} warm?</think>"
    assert matched.accepts(spec, CALL) and matched.accepts(spec, f"{thought}\n\n{CALL}")
    assert matched.accepts(spec, thought + CALL) and not matched.accepts(spec, thought)
    assert not matched.accepts(spec, f"{thought}Yes.{CALL}") and not matched.accepts(spec, f"Yes.{CALL}")
    opened = grammar(matched, reasoning=OPENED)
    assert matched.accepts(opened, f"Is it?</think>{CALL}") and not matched.accepts(opened, CALL)
    endless = "It may be " * 50
    assert matched.prefix(opened, endless) == len(endless)


def test_arguments_of_strict_tools_match_where_the_model_is_free_to_call(matched):
    tools = [Tool("weather", None, WEATHER, strict=True), Tool("weather_flag", None, FLAG)]
    spec = grammar(matched, tools=tools, must=False, parallel=True)
    loose = FLAG_CALL.replace('"on"', '"off"')
    accepted = ["", "Hello <tool_cal", "a {b} <b>\n", f"Well: {CALL}", f"{CALL}\n{loose} and {CALL}", "ü…"]
    assert [one for one in accepted if not matched.accepts(spec, one)] == []
    wrong = CALL.replace('"Rome"', "7")
    refused = [wrong, f"Well: {wrong}", f"{loose}{wrong}", CALL[:-1], CALL.replace("weather", "wind")]
    assert [one for one in refused if matched.accepts(spec, one)] == []
    single = grammar(matched, tools=tools, must=False)
    assert matched.accepts(single, f"{CALL} done") and not matched.accepts(single, f"{CALL}\n{CALL}")


@pytest.mark.parametrize("parser", ["llama3_json", "mistral", "mistral_args", "mistral_args_id", "gpt_oss"])
def test_strict_tools_in_other_formats(matched, parser):
    tools = [Tool("weather", None, WEATHER, strict=True), Tool("weather_flag", None, FLAG)]
    spec = grammar(matched, parser, tools, must=False)
    text = "<|channel|>final<|message|>Hi {x}" if parser == "gpt_oss" else "Hi {x}"
    for one in (*VALID[parser], text):
        assert matched.accepts(spec, one), one
    assert not matched.accepts(spec, VALID[parser][0].replace('"Rome"', "7"))
    assert matched.accepts(spec, VALID[parser][1].replace('"on"', '"off"'))


@pytest.mark.parametrize("head", ['"id": "1", "name"', '"x": 1, "name"', '"\\u006eame"'])
def test_calls_with_members_in_another_order_are_bound_too(matched, head):
    """The parser reads them as calls."""
    tools = [Tool("weather", None, WEATHER, strict=True)]
    spec = grammar(matched, "llama3_json", tools, must=False)
    assert not matched.accepts(spec, "{" + head + ': "weather", "parameters": {"zz": 1}}')
    for text in ('{"answer": "x"}', 'the "name" {"name"'):
        assert matched.accepts(spec, text)


def test_reasoning_in_front_of_free_text_may_name_the_marker(matched):
    tools = [Tool("weather", None, WEATHER, strict=True)]
    spec = grammar(matched, tools=tools, must=False, reasoning=THINK)
    assert matched.accepts(spec, f"<think>Why?</think>\n\n{CALL}") and matched.accepts(spec, "Hi")
    assert not matched.accepts(spec, f"<think>Why?</think>{CALL.replace('Rome', 'Constantinople')}")
    assert not matched.accepts(spec, "<think>Why?")


@pytest.mark.parametrize(
    ("inner", "valid", "wrong"),
    [
        (GrammarSpec("json_schema", json.dumps(FLAG)), '{"on":true}', '{"on": true}'),
        (GrammarSpec("json_schema", "true"), '[1,"a"]', "[1,"),
        (GrammarSpec("regex", r"a/b|[0-9]+\s?"), "a/b", "a"),
        (GrammarSpec.of_choices(["yes", 'n"o']), 'n"o', "no"),
        (GrammarSpec("lark", 'start: x+\nx: "}" | thought\nthought: "{"\n%ignore / /'), "} {", "x"),
        (GrammarSpec("lark", '%llguidance {}\nstart: %json {"const": 1}\n# }\n'), "1", "2"),
    ],
)
def test_every_grammar_can_begin_after_reasoning(matched, inner, valid, wrong):
    for spec, before in [
        (reasoning_grammar(inner, THINK, matched.marker), ["", "<think>Hm } yes</think>"]),
        (reasoning_grammar(inner, OPENED, matched.marker), ["Hm</think>", "</think>"]),
        (
            reasoning_grammar(inner, HARMONY, matched.marker),
            [
                "<|channel|>final<|message|>",
                "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>",
            ],
        ),
    ]:
        if inner.kind == "lark":  # it may begin with line ends: those before it have a fixed number
            before = [f"{one}\n\n" if one.endswith("</think>") else one for one in before]
        for one in before:
            assert matched.accepts(spec, one + valid), one
            assert not matched.accepts(spec, one + wrong) and not matched.accepts(spec, one)


@pytest.mark.parametrize("bare", [False, True])
def test_line_ends_precede_a_grammar_in_larks_syntax_as_others(matched, bare):
    """0 to 2, where no match begins with one: what the parser leaves out is then no part of the answer."""
    inner = GrammarSpec("lark", 'start: "a" tail?\ntail: "\\n" start', bare=bare)
    tools = [Tool("weather_flag", None, FLAG)]
    behind_calls = tool_grammar(
        "hermes", tools, must_call=False, parallel=False, reasoning=THINK, marker=matched.marker, answer=inner
    )  # fmt: skip
    for spec in (reasoning_grammar(inner, THINK, matched.marker), behind_calls):
        found = [
            count for count in range(4) if matched.accepts(spec, "<think>Hm</think>" + count * "\n" + "a\na")
        ]
        assert found == ([0, 1, 2] if bare else [2])


def test_what_cannot_be_a_grammar_has_a_reason(matched):
    with pytest.raises(ValueError, match="Python"):
        grammar(matched, "pythonic")
    with pytest.raises(ValueError, match="unknown"):
        grammar(matched, "unknown")
    with pytest.raises(ValueError, match="text are not an object"):
        grammar(matched, tools=[Tool("text", None, {"type": "string"})])
    with pytest.raises(ValueError, match="no tools"):
        grammar(matched, tools=[])
    with pytest.raises(ValueError, match="JSON does not have"):
        grammar(matched, tools=[Tool("big", None, {"const": 1 << 70})])
    with pytest.raises(ValueError, match="at most 131072"):
        grammar(matched, tools=[Tool("long", None, {"const": "x" * (128 << 10)})])
    with pytest.raises(ValueError, match="JSON object"):
        reasoning_grammar(GrammarSpec("lark", '{"grammars": []}'), THINK, matched.marker)


def test_the_longest_list_of_choices_may_follow_reasoning_and_stand_beside_calls(matched):
    choices = GrammarSpec.of_choices(f"c{number}" for number in range(MAX_GRAMMAR_CHOICES))
    beside = tool_grammar(
        *("hermes", TOOLS),
        must_call=False,
        parallel=True,
        reasoning=THINK,
        marker=matched.marker,
        answer=choices,
    )
    for spec in (reasoning_grammar(choices, THINK, matched.marker), beside):
        assert matched.accepts(spec, "<think>Hm</think>\nc1998") and matched.accepts(spec, "c7")


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "parameters": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize("reasoned", [False, True])
def test_calls_or_an_answer_by_the_schema(matched, parser, reasoned):
    """Both in one grammar, also where both are JSON objects with the same members."""
    reasoning = (HARMONY if parser == "gpt_oss" else THINK) if reasoned else None
    answer = GrammarSpec("json_schema", json.dumps(PERSON))
    tools = [Tool("weather", None, WEATHER, strict=True), Tool("weather_flag", None, FLAG)]
    spec = tool_grammar(
        parser, tools, must_call=False, parallel=True, reasoning=reasoning, marker=matched.marker, answer=answer
    )  # fmt: skip
    final = "<|channel|>final<|message|>" if parser == "gpt_oss" else ""
    people = [
        '{"name":"weather"}',
        '{"name":"we","parameters":3}',
        '{"name":"Ada L."}',
        '{"name":"weather_f"}',
    ]
    called = VALID[parser]
    if parser == "llama3_json":  # compact JSON is the answer's
        called = (called[0], '{"name": "weather_flag", "parameters": {"on":false}}')
    loose = called[1].replace('"on"', '"off"')
    accepted = [*called, loose, *(final + one for one in people)]
    if reasoned and parser != "gpt_oss":
        accepted += [f"<think>Who?</think>\n\n{one}" for one in accepted]
    if reasoned and parser == "gpt_oss":
        accepted += [f"<|channel|>analysis<|message|>Hm<|end|><|start|>assistant{one}" for one in accepted]
    assert [one for one in accepted if not matched.accepts(spec, one)] == []
    wrong = [
        final + "Hello",
        final + '{"name":3}',
        final + '{"name":"Ada","age":3}',
        VALID[parser][0].replace('"Rome"', "7"),
        VALID[parser][0] + people[0],
        final + people[0] + people[0],
        "",
        *(VALID[parser][1:] if parser == "llama3_json" else ()),
    ]
    assert [one for one in wrong if matched.accepts(spec, one)] == []
    demanded = tool_grammar(
        parser, tools, must_call=True, parallel=True, reasoning=reasoning, marker=matched.marker, answer=answer
    )  # fmt: skip
    assert demanded == tool_grammar(
        parser, tools, must_call=True, parallel=True, reasoning=reasoning, marker=matched.marker
    )


@pytest.mark.parametrize("parser", FORMATS)
def test_whatever_the_mask_allows_is_calls_or_the_answer(matched, parser):
    tools = [Tool("weather_flag", None, FLAG, strict=True)]
    answer = GrammarSpec("json_schema", json.dumps(PERSON))
    spec = tool_grammar(
        parser, tools, must_call=False, parallel=False, reasoning=None, marker=matched.marker, answer=answer
    )  # fmt: skip
    special = {text: matched.id_of(text) for text in MARKERS if matched.id_of(text) is not None}
    for seed in range(6):
        ended = matched.walk(spec, seed)
        assert ended is not None
        names = ["weather_flag"]
        source = format_of(
            parser.removesuffix("_id").removesuffix("_args"),
            "gpt_oss" if parser == "gpt_oss" else "",
            opened=False,
            special=special,
            names=names,
        )
        calls, content = read_parts(source.parser(), with_ids(ended, special))
        if content:
            jsonschema.validate(json.loads(content), PERSON)
            assert not calls
        else:
            ((_, arguments),) = calls
            jsonschema.validate(json.loads(arguments), FLAG)


def test_an_answer_that_looks_like_a_call_of_another_function_is_content():
    for text in (
        '{"name":"Ada"}',
        '{"name":"weather"}',
        '{"name":"Ada","parameters":3}',
        '{"parameters":3,"name":"Ada"}',
        '{"name":"weather","parameters":3}',
        '{"name":"weather","parameters": ["a"]}',
        '{"parameters":3,"name":"weather"}',
        '{"parameters":{},"name":"Ada"}',
        '{"name":"weather","parameters":  ',
    ):
        # Of any function: with any arguments behind the name, or an object of them before it
        of_any = "parameters" in text and (text.startswith('{"name"') or "{}" in text)
        for names, called in ((["weather"], False), (None, of_any)):
            source = format_of("llama3_json", "", opened=False, special={}, names=names)
            calls, content = read_parts(source.parser(), list(text))
            assert bool(calls) == called and content == ("" if called else text)
    for parser, text in [
        ("mistral", 'a \n[TOOL_CALLS]wind{"a": 1} b'),
        ("mistral", '[TOOL_CALLS]wind[ARGS]{"a": 1}'),
        ("mistral", '[TOOL_CALLS][{"name": "wind", "arguments": {}}]'),
        ("pythonic", "[weather(a=1), wind()]"),
        ("hermes", 'a \n<tool_call>{"name": "weather", "arguments": 3}</tool_call>'),
    ]:
        parsed = format_of(parser, "", opened=False, special={}, names=["weather"])
        for pieces in ([text], list(text)):
            assert read_parts(parsed.parser(), pieces) == ([], text)
    for parser, text in [("mistral", '[TOOL_CALLS]weather{"a": 1}'), ("pythonic", "[weather(a=1)]")]:
        parsed = format_of(parser, "", opened=False, special={}, names=["weather"])
        assert read_parts(parsed.parser(), list(text)) == ([("weather", '{"a": 1}')], "")
    source = format_of("llama3_json", "", opened=False, special={}, names=["weather"])
    assert read_parts(source.parser(), VALID["llama3_json"][0])[0] == [("weather", '{"city": "Rome"}')]


@pytest.mark.parametrize(
    "answer",
    [GrammarSpec("lark", 'start: "yes"'), GrammarSpec.of_choices(["yes", CALL])],
    ids=["lark", "choice"],
)
def test_no_answer_is_refused_where_calls_begin_with_a_token(matched, answer):
    """A text has none: also one that looks like a call is told from calls."""
    tools = [Tool("weather", None, WEATHER, strict=True)]

    def made():
        return tool_grammar(
            "hermes", tools, must_call=False, parallel=False, reasoning=None, marker=matched.marker, answer=answer
        )  # fmt: skip

    if matched.id_of("<tool_call>") is None:
        with pytest.raises(ValueError, match="call"):
            made()
    else:
        assert matched.accepts(made(), "yes") and matched.accepts(made(), CALL)
