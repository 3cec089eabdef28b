"""Schemas whose answers the library would get wrong, or has no grammar for, are refused by their place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError
from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import GrammarSpec
from router.request.grammar.verdict import tried
from tests.harness.model_text import VOCAB, make_model_text


class Library:
    def __init__(self, text: str):
        self.tokenizer: LLTokenizer = make_tokenizer(text, VOCAB, (2,))
        self._encode = Tokenizer.from_str(text).encode

    def accepts(self, schema: dict[str, Any], answer: str) -> bool:
        matcher = make_matcher(GrammarSpec("json_schema", json.dumps(schema)), self.tokenizer)
        tokens = self._encode(answer, add_special_tokens=False).ids
        return matcher.validate_tokens(tokens) == len(tokens) and bool(
            matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    def refusal(self, schema: dict[str, Any]) -> str:
        found = tried(self.tokenizer, GrammarSpec("json_schema", json.dumps(schema)))
        return "" if found is None else found[0]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library((make_model_text(tmp_path_factory.mktemp("model")) / "tokenizer.json").read_text())


WRONG = [{"const": "a\u0001b"}, {"enum": ["x", "a\u007fb"]}] + [
    {"type": "string", "pattern": f"^a{one}b$"}
    for one in (
        r"\x01",
        r"[\x01]",
        r"[\x02-\x02]",
        r"\x{1}",
        r"\v",
        r"\a",
        "\u007f",
        r"[^\x00\x02-\U0010ffff]",
    )
]


@pytest.mark.parametrize("pattern", ["\\", r"^a" + "\\", r"\\" + "\\"])
def test_a_backslash_that_escapes_nothing_is_refused(library, pattern):
    """The library leaves it out, so that the rest was the pattern."""
    text, names = (
        {"type": "string", "pattern": pattern},
        {"type": "object", "patternProperties": {pattern: {}}},
    )
    assert library.refusal(text) == "at /pattern: the backslash at its end escapes nothing"
    assert library.refusal(names) == "at /patternProperties: the backslash at its end escapes nothing"
    with pytest.raises(InvalidRequestError, match="the backslash at its end"):
        make_matcher(GrammarSpec("regex", pattern), library.tokenizer)
    assert library.refusal({"type": "string", "pattern": pattern + "\\"}) == ""
    make_matcher(GrammarSpec("regex", pattern + "\\"), library.tokenizer)


NUMBERS = [
    ({"const": 2**53 + 1}, "/const"),
    ({"enum": ["a", 1234567890123456789]}, "/enum/1"),
    ({"const": {"id": [2**64 - 1]}}, "/const"),
    ({"const": -(2**63)}, "/const"),
    ({"const": 10**400}, "/const"),
]


@pytest.mark.parametrize(("schema", "place"), NUMBERS, ids=[place for _, place in NUMBERS])
def test_whole_numbers_that_would_become_others_are_refused(library, schema, place):
    """A call got another id. The library takes them for floats, and crashes on the least one."""
    found = tried(library.tokenizer, GrammarSpec("json_schema", json.dumps({"properties": {"x": schema}})))
    assert found is not None and f"/properties/x{place}" in found[0] and "no float is" in found[0]


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**63 - 1, 10**17, -(2**63) + 1024, 2**60])
def test_whole_numbers_that_are_floats_are_written(library, value):
    assert library.refusal({"const": value}) == ""
    assert library.accepts({"const": value}, str(value))


@pytest.mark.parametrize("pattern", ["^[a[b]c]$", "^[^&&a]$", "^[^~~a]$", "^[_[:alnum:]]+$", "^[a--c]$"])
def test_sets_of_sets_in_classes_are_refused(library, pattern):
    assert "sets of sets" in library.refusal({"type": "string", "pattern": pattern})


@pytest.mark.parametrize("pattern", [r"^[a\[b]$", "^[a&b~c-]$", r"^\[a&&b]$", "^a&&b~~c--d$"])
def test_the_same_characters_are_no_sets_elsewhere(library, pattern):
    assert library.refusal({"type": "string", "pattern": pattern}) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"type": {}, "minimum": 1},
        {"type": [{}], "minimum": 1},
        {"type": "string", "pattern": "(?a)(?u)x"},
    ],
)
def test_what_is_no_schema_at_all_is_refused_and_raises_nothing(library, schema):
    assert library.refusal(schema)


@pytest.mark.parametrize("schema", WRONG, ids=map(json.dumps, WRONG))
def test_control_characters_that_have_no_short_escape_are_refused(library, schema):
    """The library still leaves them out."""
    assert library.accepts(schema, '"ab"')
    assert "is not supported: texts of answers have no escapes by number" in library.refusal(schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"x": {"const": {"k": ["\u0000"]}}}}, "/properties/x/const"),
        ({"items": {"enum": ["a", ["b", "\u001b[0m"]]}}, "/items/enum/1"),
        ({"items": {"pattern": r"^[\x01\x02]$"}}, "/items/pattern"),
        ({"items": {"pattern": r"a\z\x01"}}, "/items/pattern"),
        ({"patternProperties": {"^a\u0001": {}}}, "/patternProperties"),
    ],
)
def test_their_place_is_named(library, schema, place):
    assert library.refusal(schema).startswith(f"at {place}: ")


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"const": {"k\u0001": "\b\t\n\f\r/"}}, r'{"k\u0001":"\b\t\n\f\r/"}'),
        ({"type": "string", "pattern": r"^a[\x01-z]\n$"}, r'"a4\n"'),
        ({"type": "string", "pattern": r"^a\s\z"}, '"a "'),
        (
            {"type": "object", "properties": {"k\u0001": {"const": 1}}, "required": ["k\u0001"]},
            r'{"k\u0001":1}',
        ),
    ],
)
def test_others_are_written(library, schema, good):
    assert library.refusal(schema) == "" and library.accepts(schema, good)


@pytest.mark.parametrize(
    ("bounds", "wrong"),
    [
        ({"minimum": 2**53 + 1}, 2**53),
        ({"maximum": 2**53 + 3}, 2**53 + 4),
        ({"exclusiveMaximum": 2**53 + 3}, 2**53 + 3),
        ({"exclusiveMaximum": 2**63 - 1}, 2**63 - 1),
        ({"type": "number", "maximum": 2**62}, 2**62 + 1),
    ],
)
def test_a_bound_that_becomes_another_one_is_refused(library, bounds, wrong):
    """The library still reads bounds as floats, and writes these with 17 digits."""
    schema = {"type": "integer", **bounds}
    assert library.accepts(schema, str(wrong))
    assert library.refusal(schema).startswith(f"at /{[*bounds][-1]}: ")


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (INT64, "at /minimum: minimum may be -9223372036854774784 at least"),
        (
            {"type": "number", "maximum": 1e308},
            "at /maximum: maximum may have an absolute value of 1e18 at most",
        ),
        (
            {"type": "number", "minimum": 1e-300},
            "at /minimum: minimum may be 0, or have an absolute value of 1e-60",
        ),
        ({"type": "integer", "minimum": 10**18}, "at /minimum: Failed to generate"),
        ({"type": "integer", "maximum": -(10**18)}, "at /maximum: Failed to generate"),
    ],
)
def test_a_bound_without_a_grammar_is_named(library, schema, reason):
    assert library.refusal(schema).startswith(reason)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({**INT64, "minimum": -(2**63) + 1024}, str(2**63 - 1), str(2**63)),
        ({"type": ["integer", "null"], "maximum": 2**64 - 1, "minimum": 0}, str(2**63 - 1), "-1"),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, str(2**53), str(2**53 + 1)),
        ({"type": "number", "minimum": -1e18, "maximum": 1e18}, str(10**18), str(10**18 + 1)),
        ({"type": "number", "minimum": 0, "maximum": 1e-300}, "0", "1"),
        ({"type": "number", "minimum": 1e-60}, "1", "0"),
        ({"type": "string", "maximum": 1e30}, '"a"', "5"),
    ],
)  # fmt: skip
def test_other_schemas_accept_what_they_validate_and_nothing_else(library, schema, good, bad):
    assert library.refusal(schema) == ""
    assert library.accepts(schema, good) and not library.accepts(schema, bad)
