"""The checks of grammars at a router: which place of a schema is named, which models have no structured output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.errors import InvalidRequestError, OverloadedError, UnsupportedFieldError
from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import MAX_GRAMMAR_CHOICES, GrammarSpec, Kind, grammar_from_wire
from router.request.grammar import trial
from router.request.grammar.requested import GrammarChecks, RequestedGrammar, choice_spec, json_spec
from router.request.grammar.schema_gaps import gap_of
from router.request.grammar.trial import Finding
from tests.harness.model_text import VOCAB, make_model_text
from wire import common_pb2


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    model = make_model_text(tmp_path_factory.mktemp("model"))
    made = GrammarChecks((model / "tokenizer.json").read_text(), VOCAB, (2,))
    yield made
    made.close()


async def refusal(checks: GrammarChecks, schema: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await checks.check("", RequestedGrammar("response_format", json_spec(schema)))
    assert caught.value.field == "response_format"
    return caught.value.message


def nested(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(levels - 1)} if levels > 1 else {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"uniqueItems": True, "type": "array"}, "/uniqueItems"),
        ({"properties": {"a": {"type": "strin"}}}, "/properties/a/type"),
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "/properties/a~1b/items/not"),
        (
            {"anyOf": [{"type": "null"}, {"properties": {"x": {"if": {}, "then": {}}}}]},
            "/anyOf/1/properties/x/if",
        ),
        (
            {"$defs": {"d": {"contains": {}}}, "properties": {"p": {"$ref": "#/$defs/d"}}},
            "/$defs/d/contains",
        ),
        ({"properties": {"p": {"$ref": "#/$defs/none"}}}, "/properties/p/$ref"),
        ({"items": {"type": "string", "pattern": "("}}, "/items/pattern"),
        ({"properties": {"a": {"additionalItems": False}}}, "/properties/a/additionalItems"),
        ({"properties": {"a": {"items": [{}]}}}, "/properties/a/items"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"minimum": 1, "exclusiveMinimum": True}, "/exclusiveMinimum"),
        ({"minProperties": 2}, "/minProperties"),
        ({"items": {"minimum": 2.0**40 + 0.5}}, "/items/minimum"),
        ({"pattern": '^[^"]*$'}, "/pattern"),
        ({"patternProperties": {r"^[^\\/:]+$": {}}}, "/patternProperties"),
        ({"allOf": [{"required": ["a", "a"], "minProperties": 3}]}, "/allOf/0/minProperties"),
        (
            {"patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2},
            "/minProperties",
        ),
    ],
)
async def test_the_keyword_is_named_with_its_place(checks, schema, place):
    assert f"at {place}: " in await refusal(checks, schema)
    assert f"at {place}: " in await refusal(checks, schema), "remembered"


async def test_properties_that_cannot_repeat_are_counted(checks):
    listed = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    for schema in ({"minProperties": 1}, {**listed, "minProperties": 3}):
        await checks.check("", RequestedGrammar("guided_json", json_spec(schema)))
    unique = {**listed, "additionalProperties": False, "minProperties": 2}
    await checks.check("", RequestedGrammar("guided_json", json_spec(unique)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"const": 1}}, "required": ["a"]}, r'{"a":1,"b\n":2}', r'{"a":1,"\u0061":2}'),
        ({"patternProperties": {"^a": {"const": 1}}}, '{"ab":1}', r'{"\u0061b":2}'),
        ({"properties": {"\n": {"const": 1}}, "required": ["\n"]}, r'{"\n":1}', r'{"\n":1,"\u000a":2}'),
    ],
)
def test_a_name_cannot_be_written_in_two_ways(tmp_path, schema, good, bad):
    """Readers take the value of the second one, which the schema does not allow."""
    text = (make_model_text(tmp_path) / "tokenizer.json").read_text()
    matcher = make_matcher(GrammarSpec("json_schema", json.dumps(schema)), make_tokenizer(text, VOCAB, (2,)))
    encoded = Tokenizer.from_str(text).encode(good, add_special_tokens=False).ids
    assert matcher.validate_tokens(encoded) == len(encoded)
    encoded = Tokenizer.from_str(text).encode(bad, add_special_tokens=False).ids
    assert matcher.validate_tokens(encoded) < len(encoded)


QUOTES = {'"': r'"\""', "\\": r'"\\"'}
CLASSES = [
    r'[^"]', r"[^\\]", r'[^"\\]', r'[^\n"]', r"[\x00-!]", r"[\x00-\x1f]", r"[^\w]", r"\W", r"\S", ".", r"\s",
    r'[^\s"]',
    r'[^\r\n"]', r"[^\x00-\x1f]", r'[^"\x00-\x1f]', r"[ -!#-~]", r"[^a]", r"[^\d]", r"(?<a>[^'\"])",
    r"[\s\S]", r"a|[^,\"]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CLASSES)
def test_classes_that_the_library_widens_are_found(tmp_path, pattern):
    """The library still has this fault, and no other class has it."""
    text = (make_model_text(tmp_path) / "tokenizer.json").read_text()
    tokenizer, encode = make_tokenizer(text, VOCAB, (2,)), Tokenizer.from_str(text).encode
    accepted = set()
    for char, answer in QUOTES.items():
        schema = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
        matcher = make_matcher(GrammarSpec("json_schema", schema), tokenizer)
        encoded = encode(answer, add_special_tokens=False).ids
        if matcher.validate_tokens(encoded) == len(encoded):
            accepted.add(char)
    python = pattern.replace("?<a>", "?P<a>")
    wrong = any(re.fullmatch(python, char) is None for char in accepted)
    assert (gap_of({"pattern": pattern}) is not None) == wrong


async def test_a_text_that_needs_an_escape_by_number_is_refused(checks):
    assert await refusal(checks, {"const": "\x01"})


async def test_schemas_have_a_depth(checks):
    await checks.check("", RequestedGrammar("guided_json", json_spec(nested(32))))
    assert "more than 32 levels" in await refusal(checks, nested(33))


def test_grammars_of_one_text_and_two_kinds_are_two():
    """Verdicts and compiled grammars are found by the key."""
    kinds: list[Kind] = ["json_schema", "regex", "choice", "lark"]
    assert len({GrammarSpec(kind, "[1]").key for kind in kinds}) == 4
    assert GrammarSpec("lark", "a", bare=True).key == GrammarSpec("lark", "a").key


def test_grammars_have_a_size():
    with pytest.raises(ValueError, match="at most 131072"):
        json_spec({"const": "x" * (128 << 10)})
    with pytest.raises(InvalidRequestError, match="at most 131072"):
        grammar_from_wire(common_pb2.Grammar(regex="x" * ((128 << 10) + 1)))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (json_spec, "[" + "0," * (4 << 20) + "0]"),
        (json_spec, {"enum": [None, *[0] * 300_000]}),
        (choice_spec, ["x" * 4500] * 1_800),
        (grammar_from_wire, common_pb2.Grammar(choice=common_pb2.Choices(texts=["x" * 4500] * 1_800))),
    ],
    ids=["text of a schema", "values of a schema", "choices", "choices over gRPC"],
)
def test_a_grammar_of_a_whole_body_is_refused_without_reading_it(make, given):
    def seconds() -> float:
        began = time.process_time()
        with pytest.raises((ValueError, InvalidRequestError), match="at most 131072"):
            make(given)
        return time.process_time() - began

    assert (
        min(seconds() for _ in range(3)) < 0.008
    )  # 8 MB: 170 ms to parse as a schema, 20 ms to write as choices; 40 ms to look at all values


def test_as_many_choices_are_allowed_as_the_library_takes(tmp_path):
    texts = [str(number) for number in range(MAX_GRAMMAR_CHOICES)]
    model = make_model_text(tmp_path)
    tokenizer = make_tokenizer((model / "tokenizer.json").read_text(), VOCAB, (2,))
    matcher = make_matcher(choice_spec(texts), tokenizer)
    assert matcher.consume_tokens(tokenizer.tokenize_str(texts[-1])) and matcher.is_accepting()
    for more in (1, 8001):
        many = common_pb2.Grammar(choice=common_pb2.Choices(texts=[*texts, *["more"] * more]))
        with pytest.raises(
            InvalidRequestError, match=f"{MAX_GRAMMAR_CHOICES + more} choices; at most 1999"
        ) as caught:
            grammar_from_wire(many)
        assert (caught.value.field, caught.value.limit) == ("grammar", "1999")


def test_the_text_of_a_schema_is_read_as_the_schema_itself():
    schema = {"type": "object", "properties": {"ä": {"maximum": 2.5}}}
    assert json_spec(json.dumps(schema)) == json_spec(schema)
    for wrong in ("{", "[" * 100_000, "NaN", '{"a": "\\ud800"}', '"text"', "\ud800"):
        with pytest.raises(ValueError):
            json_spec(wrong)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity"])
def test_a_schema_has_finite_numbers(number):
    """None becomes null, which other answers match. A text names the place; a client's own objects have no text."""
    with pytest.raises(
        ValueError, match=r"too large for a float" if "e" in number else r"JSON schema.*column 17"
    ):
        json_spec(f'{{"enum": [null, {number}]}}')
    with pytest.raises(ValueError, match="too large for a float, or none"):
        json_spec({"items": {"enum": [None, float(number)]}})
    assert json_spec({"enum": [None, 1e308]}).text == '{"enum":[null,1e+308]}'


@pytest.mark.parametrize("message", [common_pb2.Grammar(), common_pb2.Grammar(choice=common_pb2.Choices())])
def test_a_rule_of_no_known_kind_is_refused(message):
    with pytest.raises(InvalidRequestError, match="has none of json_schema"):
        grammar_from_wire(message)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("json_schema", "{}"),
        GrammarSpec("regex", "a+"),
        GrammarSpec("choice", '["a","b"]'),
        GrammarSpec("lark", 'start: "a"'),
    ],
)
def test_grammars_cross_the_wire(spec):
    assert grammar_from_wire(spec.to_wire()) == spec


async def test_a_model_whose_tokenizer_has_no_use_for_grammars_says_why():
    plain = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    refused = GrammarChecks(plain.to_str(), 3, (2,))
    assert refused.refusal
    with pytest.raises(UnsupportedFieldError, match=r"guided_json: this model has no structured output: .+"):
        await refused.check("", RequestedGrammar("guided_json", json_spec({})))
    assert "end-of-sequence" in GrammarChecks(json.dumps({}), 3, ()).refusal


def references(count: int) -> str:
    """Each definition is a reference to the next one."""
    last = {f"d{count}": {"type": "null"}}
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)} | last
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", references(2500), "too much time, memory or depth"),  # overflows a thread's stack
        (
            "lark",
            "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(8000)) + 'a8000: "x"',
            "too much",
        ),
        (
            "lark",
            "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(8000)) + 'A8000: "x"',
            "too much",
        ),
        pytest.param("regex", "a?" * 40_000, "too much", marks=pytest.mark.long),  # would take minutes
        pytest.param("regex", "a{1000000}", "too", marks=pytest.mark.long),  # the library hangs
        ("json_schema", '{"$ref": "#"}', "no answer ever ends"),
        ("choice", json.dumps([str(i) for i in range(3000)]), "cannot be followed: .*2032"),
    ],
    ids=range(7),
)
async def test_grammars_that_would_end_or_stop_a_process_are_refused(checks, kind, text, reason):
    asked = RequestedGrammar("guided", GrammarSpec(kind, text))
    with pytest.raises(InvalidRequestError, match=reason):
        await answered(checks, asked)
    await answered(checks, RequestedGrammar("guided", GrammarSpec("regex", "still|here")))


async def answered(checks, asked, tries=5):
    """A process that gets too little of a busy processor has no verdict: its request is sent again."""
    for _ in range(tries - 1):
        with contextlib.suppress(OverloadedError):
            return await checks.check("", asked)
    return await checks.check("", asked)


async def test_a_killed_process_of_the_checks_is_started_again(checks):
    await checks.check("", RequestedGrammar("guided", GrammarSpec("regex", "before")))
    checks._trials._server.kill()
    await checks.check("", RequestedGrammar("guided", GrammarSpec("regex", "after")))


async def test_all_grammars_of_a_request_are_tried_in_one_process(checks, monkeypatch):
    asked = [RequestedGrammar(f"tools[{i}]", json_spec({"const": f"one of {i}"})) for i in range(128)]
    trials: list[int] = []
    find = checks._trials.find

    def counted(specs):
        trials.append(len(specs))
        return find(specs)

    monkeypatch.setattr(checks._trials, "find", counted)
    await checks.check("", *asked)
    await checks.check("", *asked)
    assert trials == [128]
    wrong = RequestedGrammar("tools[128]", json_spec({"contains": {}}))
    with pytest.raises(InvalidRequestError, match="at /contains") as caught:
        await checks.check("", *asked, wrong, RequestedGrammar("tool_choice", json_spec({"const": "all"})))
    assert caught.value.field == "tools[128]" and trials == [128, 2]


async def test_load_is_no_refusal(checks, monkeypatch):
    def late(specs):
        time.sleep(0.2)
        return Finding(len(specs))

    asked = RequestedGrammar("guided", GrammarSpec("regex", "under load"))
    with monkeypatch.context() as patch:
        patch.setattr(checks._trials, "_ask", lambda question: json.dumps(trial._NO_VERDICT))
        with pytest.raises(OverloadedError) as caught:
            await checks.check("", asked)
        assert caught.value.retryable and caught.value.retry_after_seconds
    with monkeypatch.context() as patch:
        patch.setattr("router.request.grammar.requested.CHECK_SECONDS", 0.02)
        patch.setattr(checks._trials, "find", late)
        with pytest.raises(OverloadedError):
            await checks.check("", asked)
    until = time.monotonic() + 5
    while ("", asked.spec.key) not in checks._checked and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert ("", asked.spec.key) in checks._checked, "what is found after the deadline is remembered"
    await checks.check("", asked)


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ('start: "a" tail?\ntail: "\\n" start', True),
        ('start: tail? "a"\ntail: "\\n"', False),
        ("start: /[^a]+/", False),
        ("start: /./", True),
        ('start: "a"\n%ignore /\\s/', True),  # what is ignored never comes first
        ('start: %json {"const": 1}', True),
        ("start: missing", False),  # its own check says why
    ],
)
async def test_whether_a_line_end_may_begin_an_answer_is_found_by_the_library(checks, text, bare):
    asked = RequestedGrammar("guided_grammar", GrammarSpec("lark", text))
    for _ in range(2):
        assert (await checks.with_known_begin("t", asked)).spec.bare == bare
    regex = RequestedGrammar("guided_regex", GrammarSpec("regex", "a"))
    assert await checks.with_known_begin("t", regex) is regex


async def test_where_no_process_can_tell_the_error_names_the_field(tmp_path, monkeypatch):
    monkeypatch.setattr(trial.GrammarTrials, "_ask", lambda *_: json.dumps("no verdict").encode())
    model = make_model_text(tmp_path)
    checks = GrammarChecks((model / "tokenizer.json").read_text(), VOCAB, (2,))
    try:
        with pytest.raises(OverloadedError) as caught:
            await checks.check("", RequestedGrammar("response_format", json_spec({})))
    finally:
        checks.close()
    assert caught.value.field == "response_format" and caught.value.retry_after_seconds > 0
    assert caught.value.message.startswith("response_format: ")


def test_choices_are_counted_before_they_are_looked_at():
    """A million numbers took 25 ms of the event loop."""

    class Unread(list[int]):
        def __iter__(self):
            raise AssertionError("read")

    with pytest.raises(ValueError, match="2000 choices; at most 1999"):
        choice_spec(Unread([1] * 2000))
    with pytest.raises(ValueError, match="must be a non-empty list of texts"):
        choice_spec([1])


def test_an_end_of_sequence_token_is_no_text(tmp_path):
    """Where a tokenizer does not call it special, and it has no angle brackets, it would be allowed where its text is."""
    raw = json.loads((make_model_text(tmp_path) / "tokenizer.json").read_text())
    vocab = raw["model"]["vocab"]
    raw["model"]["vocab"] = {"END" if token == 2 else text: token for text, token in vocab.items()}
    plain = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    raw["added_tokens"] = [{"id": 2, "content": "END", **plain}]
    tokenizer = make_tokenizer(json.dumps(raw), VOCAB, (2,))
    matcher = make_matcher(GrammarSpec("choice", '["END", "x"]'), tokenizer)
    allowed = matcher.compute_bitmask()
    assert not allowed[0] >> 2 & 1 and any(allowed)
