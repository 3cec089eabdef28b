"""Schemas are rewritten where the library's grammar would have answers that they do not validate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.rewriting import MOST_EXACT, for_library
from cluster.grammar.schema_parts import reachable, target_of
from cluster.grammar.spec import GrammarSpec
from router.text.parsers.lark_rules import json_rule

MODEL = Path(__file__).parents[3] / "demo" / "model"
ABOVE, BELOW = {"type": "number", "exclusiveMinimum": 1}, {"maximum": 1.5}
CLOSED: dict[str, Any] = {"type": "object", "required": ["a"], "additionalProperties": False}
LIST = {"type": "array", "minItems": 1, "maxItems": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer((MODEL / "tokenizer.json").read_text(), 4096, (2,))


def accepts(tokenizer: Any, schema: Any, *texts: str, within: Any = "json_schema") -> list[bool]:
    grammar = json.dumps(schema)
    if within == "lark":
        grammar = f"start: {json_rule(schema, spaced=False)}"
    matcher = make_matcher(GrammarSpec(within, grammar), tokenizer)
    found = []
    for text in texts:
        tokens, copy = tokenizer.tokenize_str(text), matcher.deep_copy()
        taken = copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens)
        found.append(bool(taken and copy.is_accepting()))
    return found


BOUNDS: dict[str, tuple[dict[str, Any], str]] = {
    "one part": (ABOVE | BELOW, "{}"),
    "within all": ({"type": "number", **BELOW, "allOf": [ABOVE]}, "{}"),
    "within any": ({"type": "number", **BELOW, "anyOf": [ABOVE, {"const": 0.5}]}, "{}"),
    "two of all": ({"allOf": [ABOVE, BELOW]}, "{}"),
    "an item of a list": ({"allOf": [ABOVE, {"$ref": "#/allOf/2"}, BELOW]}, "{}"),
    "reference": ({**ABOVE, "$ref": "#/$defs/a", "$defs": {"a": BELOW}}, "{}"),
    "reference with a space": ({**ABOVE, "$ref": "#/$defs/a%20b", "$defs": {"a b": BELOW}}, "{}"),
    "reference with a slash": ({**ABOVE, "$ref": "#/$defs/a~1b", "$defs": {"a/b": BELOW}}, "{}"),
    "property": (
        {**CLOSED, "properties": {"a": ABOVE}, "allOf": [{"properties": {"a": BELOW}}]},
        '{{"a":{}}}',
    ),
    "pattern": ({**CLOSED, "properties": {"a": ABOVE}, "patternProperties": {"^a": BELOW}}, '{{"a":{}}}'),
    "items": ({"allOf": [{**LIST, "items": ABOVE}, {"items": BELOW}]}, "[{}]"),
    "first item": ({**LIST, "allOf": [{"items": ABOVE}, {"prefixItems": [BELOW]}]}, "[{}]"),
    "elsewhere": (
        {**LIST, "items": {"$ref": "#/components/X"}, "components": {"X": ABOVE | BELOW}},
        "[{}]",
    ),
}


@pytest.mark.parametrize("place", BOUNDS)
@pytest.mark.parametrize("within", ["json_schema", "lark"])
def test_an_excluded_integer_is_excluded_wherever_the_other_bound_is(
    place: str, within: str, tokenizer: Any
) -> None:
    schema, form = BOUNDS[place]
    numbers = ["1", "1.0", "1.25", "1.000000001", "1.5", "1.6", "0.75"]
    found = accepts(tokenizer, schema, *map(form.format, numbers), within=within)
    assert found == [number in ("1.25", "1.000000001", "1.5") for number in numbers]


@pytest.mark.parametrize("limit", [0, 1, -1, 10**6, -(10**9), MOST_EXACT, -MOST_EXACT])
def test_bounds_beside_an_integer_are_next_to_it(limit: int, tokenizer: Any) -> None:
    below = {"type": "number", "exclusiveMaximum": limit, "minimum": limit - 0.5}
    above = {"type": "number", "exclusiveMinimum": limit, "maximum": limit + 0.5}
    for schema, inside in ((below, limit - 0.25), (above, limit + 0.25)):
        assert accepts(tokenizer, schema, str(limit), f"{limit}.0", json.dumps(inside)) == [
            False,
            False,
            True,
        ]
        jsonschema.validate(inside, schema)
        (bound,) = (
            value
            for value in json.loads(for_library(json.dumps(schema))).values()
            if value not in schema.values()
        )
        assert 0 < abs(bound - limit) <= max(1.01e-9, abs(limit) * 1.01e-14)


def test_whole_bounds_stay_as_they_are() -> None:
    schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 2}
    assert json.loads(for_library(json.dumps(schema))) == schema


def test_no_integer_lies_between_an_excluded_one_and_a_fraction(tokenizer: Any) -> None:
    schema = {"type": "integer", "exclusiveMinimum": 1, "maximum": 3.5}
    assert accepts(tokenizer, schema, "1", "2", "3", "4") == [False, True, True, False]


SPACES = "\t\r \xa0\u2028\u3000"


@pytest.mark.parametrize("pattern", [r"^\s$", r"^[\s]$", r"^[^\S]$", r"^[_\s-]$"])
def test_blanks_are_those_of_ecma_262(pattern: str, tokenizer: Any) -> None:
    texts = [json.dumps(one, ensure_ascii=False) for one in (*SPACES, "\ufeff", "\x85", "a", "")]
    found = accepts(tokenizer, {"type": "string", "pattern": pattern}, *texts)
    assert found == [True] * (len(SPACES) + 1) + [False] * 3


@pytest.mark.parametrize("pattern", [r"^\S$", r"^[\S]$", r"^[^\s]$"])
def test_other_characters_are_those_of_ecma_262(pattern: str, tokenizer: Any) -> None:
    texts = [json.dumps(one, ensure_ascii=False) for one in ("a", "\\", "\x85", " ", "\u3000", "\ufeff")]
    found = accepts(tokenizer, {"type": "string", "pattern": pattern}, *texts)
    assert found == [True, True, True, False, False, False]


def test_an_escaped_backslash_is_no_blank(tokenizer: Any) -> None:
    assert accepts(tokenizer, {"type": "string", "pattern": r"^\\s$"}, r'"\\s"', '" "') == [True, False]
    names = {"type": "object", "patternProperties": {r"^\s$": {"const": 1}}, "additionalProperties": False}
    assert accepts(tokenizer, names, '{" ":1}', '{"\x85":1}') == [True, False]


def test_a_dialect_changes_nothing(tokenizer: Any) -> None:
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "$id": "http://x/y#/$defs/a"}
    schema = {**old, **CLOSED, "$defs": {"a": {}}, "properties": {"a": {**old, "const": 1}}}
    assert accepts(tokenizer, schema, '{"a":1}', '{"a":2}', "3") == [True, False, False]


def test_names_and_values_are_no_keywords() -> None:
    schema = {"properties": {"$schema": {"const": {"$id": 1, "pattern": r"\s"}}}, "enum": [{"$schema": "a"}]}
    assert json.loads(for_library(json.dumps(schema))) == schema


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("#/x/a%20b", "a b"), ("#/x/a~1b", "a/b"), ("#/x/a~01b", "a~1b"), ("#/x/a%7E1b", "a/b"), ("#/x/%2541", "%41"),
        ("#/x/0", "0"), ("#/x/+", "+"), ("#/x/%C3%A9", "é"),
        ("#/x/a%2Fb", None), ("#/x/~2", None), ("#/x/%", None), ("#/x/%FF", None), ("#/x//a", None), ("#/", None),
        ("#a", None), ("a", None), ("http://x/y#/x/0", None), (5, None), ("#/x/none", None), ("#/list/01", None),
        ("#/list/9", None),
    ],
)  # fmt: skip
def test_references_lead_where_the_library_goes(reference: Any, name: str | None, tokenizer: Any) -> None:
    """Where they may lead elsewhere, the router refuses them."""
    parts = {
        one: {"const": one} for one in ("a b", "a/b", "a~1b", "%41", "A", "0", "+", " ", "é", "", "~2", "%")
    }
    schema = {"x": parts, "list": [{}, {}], "$ref": reference}
    assert target_of(reference, schema) == (None if name is None else parts[name])
    if name is not None:
        assert accepts(tokenizer, schema, json.dumps(name, ensure_ascii=False), '""') == [True, False]


def test_each_part_is_reached_once() -> None:
    """Also by many references to the levels of one part, none of which the walk finds by itself."""
    inner: dict[str, Any] = {"title": "in"}
    for _ in range(300):
        inner = {"items": inner}
    way, ways = "#/x", []
    for _ in range(300):
        ways.append({"$ref": way})
        way += "/items"
    schema = {"x": inner, "anyOf": [*reversed(ways), {"$ref": "#"}]}
    found = list(reachable(schema))
    assert len({id(one) for one in found}) == len(found) == 1 + 301 + 301


@pytest.mark.parametrize(
    ("schema", "minimum"),
    [
        ({"exclusiveMinimum": 1, "minimum": 1.5}, 1.5),
        ({"exclusiveMinimum": 2, "minimum": 1.5}, 2.000000001),
        ({"exclusiveMinimum": 1, "minimum": "2", "maximum": 1.5}, "2"),
    ],
)
def test_of_two_bounds_on_one_side_the_closer_one_stays(schema: Any, minimum: Any) -> None:
    """And one that is no number, which the library refuses."""
    assert json.loads(for_library(json.dumps(schema)))["minimum"] == minimum


def test_patterns_that_would_become_the_same_name_stay_as_they_are() -> None:
    blank = next(iter(json.loads(for_library(r'{"patternProperties": {"^\\s$": {}}}'))["patternProperties"]))
    schema = {"patternProperties": {r"^\s$": {"const": 1}, blank: {"const": 2}}}
    assert json.loads(for_library(json.dumps(schema))) == schema
