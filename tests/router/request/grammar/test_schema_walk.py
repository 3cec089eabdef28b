"""Which place of a schema is named, wherever references lead, and in which dialect it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.grammar.library import make_tokenizer
from cluster.grammar.spec import GrammarSpec
from router.request.grammar import schema_walk
from router.request.grammar.verdict import tried
from tests.harness.schemas import schema_of

MODEL = Path(__file__).parents[4] / "demo" / "model"
ODD = '^[^"]$'
DRAFTS = {name: f"http://json-schema.org/{name}/schema#" for name in ("draft-04", "draft-06", "draft-07")} | {
    "2019-09": "https://json-schema.org/draft/2019-09/schema",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer((MODEL / "tokenizer.json").read_text(), 4096, (2,))


def refusal(tokenizer: Any, schema: Any) -> str:
    """Empty: it is supported."""
    found = tried(tokenizer, GrammarSpec("json_schema", json.dumps(schema)))
    return "" if found is None else found[0]


def within(part: Any) -> dict[str, Any]:
    return {"components": {"schemas": {"X": part}}, "items": {"$ref": "#/components/schemas/X"}}


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"pattern": ODD}, "/pattern"),
        ({"minProperties": 3}, "/minProperties"),
        ({"items": [{"const": 1}]}, "/items"),
        ({"prefixItems": [{}], "additionalItems": False}, "/additionalItems"),
        ({"oneOf": [{}], "x-guidance": {"coerce_one_of": True}}, "/x-guidance"),
        ({"properties": {"a": {"pattern": ODD}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"$ref": "#/other"}}}, "/properties/a/$ref"),
        ({"not": {}}, "/not"),
        ({"properties": {"a": {"uniqueItems": True}}}, "/properties/a/uniqueItems"),
    ],
)
def test_what_references_lead_to_is_a_part_of_the_schema(tokenizer: Any, part: Any, place: str) -> None:
    assert refusal(tokenizer, within(part)).startswith(f"at /components/schemas/X{place}: ")
    behind = within({"allOf": [{"$ref": "#/behind/a~1b/0"}]}) | {"behind": {"a/b": [part]}}
    assert refusal(tokenizer, behind).startswith(f"at /behind/a~1b/0{place}: ")
    unused = {"components": {"schemas": {"X": part}}}
    assert not refusal(tokenizer, unused), "nothing leads there"


def test_what_references_lead_to_has_levels(tokenizer: Any) -> None:
    part: dict[str, Any] = {}
    for _ in range(32):
        part = {"items": part}
    assert not refusal(tokenizer, within(part["items"]))
    assert "more than 32 levels" in refusal(tokenizer, within(part))


def test_levels_below_the_last_one_are_not_walked() -> None:
    """A body has room for parts of thousands of levels: the first that is too deep is the error."""
    deep: dict[str, Any] = {}
    for _ in range(1_000):
        deep = {"items": deep}
    levels = [*range(1, schema_walk.MAX_DEPTH + 2)]
    assert [depth for _, _, depth in schema_walk._walk(deep)] == levels
    assert [depth for _, _, depth in schema_walk._walk(within(deep))] == [1, 2, *levels]
    error = schema_walk.why_not(within(deep), lambda _: "")
    assert error is not None and error.message.endswith(f": more than {schema_walk.MAX_DEPTH} levels")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#a", "$defs": {"a": {"$anchor": "a"}}}, "/$ref"),
        ({"$ref": "http://x/y"}, "/$ref"),
        ({"items": {"$ref": 5}}, "/items/$ref"),
        ({"items": {"$ref": "#/const/a"}, "const": {"a": {"format": "date"}}}, "/items/$ref"),
        ({"$ref": "#/$defs/a/enum/0", "$defs": {"a": {"enum": [{"format": "date"}]}}}, "/$ref"),
        ({"$ref": "#/x", "x": "text"}, "/$ref"),
        ({"$id": "http://x/a", "properties": {"a": {"$id": "b", "$ref": "#/$defs/c"}}}, "/properties/a/$id"),
    ],
)
def test_references_of_other_kinds_are_refused(tokenizer: Any, schema: Any, place: str) -> None:
    assert refusal(tokenizer, schema).startswith(f"at {place}: ")


@pytest.mark.parametrize("draft", DRAFTS)
def test_keywords_mean_the_same_in_every_draft(tokenizer: Any, draft: str) -> None:
    """Those that do not are refused."""

    def named(**schema: Any) -> str:
        return refusal(tokenizer, {"$schema": DRAFTS[draft], **schema}).partition(": ")[0]

    assert not named(type="object", properties={"a": {"$ref": "#/definitions/b"}}, definitions={"b": {}})
    assert named(items={"const": 1}) == ("at /items/const" if draft == "draft-04" else "")
    assert named(prefixItems=[{}]) == ("at /prefixItems" if draft != "2020-12" else "")
    assert named(**{"$ref": "#/$defs/a", "$defs": {"a": {}}}, minLength=1, title="a") == ""
    beside = {"$ref": "#/$defs/a", "type": "object", "required": ["b"], "description": "it"}
    found = named(**{"$defs": {"a": {}}}, oneOf=[beside, {"type": "null"}])
    assert found == ("at /oneOf/0/type" if draft.startswith("draft-") else "")
    old = {"type": "object", "properties": {"a": {"id": "b", "$ref": "#/$defs/c"}}, "$defs": {"c": {}}}
    assert named(**old) == ("at /properties/a/id" if draft == "draft-04" else "")


def test_the_oldest_dialect_of_a_schema_counts(tokenizer: Any) -> None:
    schema = {"$schema": DRAFTS["draft-07"], "items": {"$schema": DRAFTS["2020-12"]}, "prefixItems": [{}]}
    assert refusal(tokenizer, schema).startswith("at /prefixItems: ")


@pytest.mark.parametrize(
    ("address", "known"),
    [
        *((address, True) for address in DRAFTS.values()),
        *((address.replace("http:", "https:").rstrip("#"), True) for address in DRAFTS.values()),
        ("http://json-schema.org/schema#", True),
        ("https://spec.openapis.org/oas/3.1/dialect/base", True),
        *(
            (address, False)
            for address in ("http://json-schema.org/draft-03/schema#", "draft-07", "", 5, None)
        ),
    ],
)
def test_dialects_are_known_by_their_addresses(tokenizer: Any, address: object, known: bool) -> None:
    for schema, place in (
        ({"$schema": address, "type": "integer"}, "/$schema"),
        ({"items": {"$schema": address}}, "/items/$schema"),
    ):
        assert refusal(tokenizer, schema).partition(": ")[0] == ("" if known else f"at {place}")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (
            {
                "type": "object",
                "properties": {"k": {"enum": ["a", "b"]}},
                "required": ["k"],
                "oneOf": [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"const": "b"}}}],
            },
            "/oneOf",
        ),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "/minItems"),
        ({"type": "string", "format": "no-such"}, "/format"),
    ],
)
def test_the_keyword_is_that_of_the_reason(tokenizer: Any, schema: Any, place: str) -> None:
    found = refusal(tokenizer, schema)
    assert found.startswith(f"at {place}: ") and "coerce_one_of" not in found


def test_schemas_of_common_libraries_are_supported(tokenizer: Any) -> None:
    day = {"type": "string", "format": "date-time", "pattern": r"^\S+T"}
    price = {"exclusiveMinimum": 0, "maximum": 0.5, "type": "number", "title": "Price"}
    pydantic = {
        "$defs": {"Item": {"type": "object", "properties": {"p": price, "d": day}, "required": ["p"]}},
        "type": "object",
        "properties": {
            "one": {"$ref": "#/$defs/Item", "description": "it"},
            "more": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Item"}}, {"type": "null"}]},
        },
        "required": ["one"],
    }
    zod = {
        "$schema": DRAFTS["draft-07"],
        "$ref": "#/definitions/a",
        "definitions": {
            "a": {
                "type": "object",
                "properties": {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {"const": "b"}},
                "required": ["a"],
                "additionalProperties": False,
            }
        },
    }
    zod_4 = {
        "$schema": DRAFTS["2020-12"],
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "t": {"type": "array", "prefixItems": [{"type": "string"}]},
        },
        "required": ["a", "t"],
        "additionalProperties": False,
        "$defs": {"A": {"id": "A", "type": "string"}},
    }
    described = zod | {"$id": "https://x/y.json"}
    for schema in (pydantic, zod, zod_4, described, *map(schema_of, range(100))):
        assert not refusal(tokenizer, schema)


def test_the_search_for_a_keyword_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[GrammarSpec] = []

    def compiles(spec: GrammarSpec) -> str:
        compiled.append(spec)
        return "bad"

    schema = {"properties": {"a": {"items": {"type": "string"}}}}
    assert schema_walk.why_not(schema, compiles) is not None and len(compiled) > 2
    compiled.clear()
    monkeypatch.setattr(schema_walk, "SEARCH_SECONDS", -1.0)
    assert schema_walk.why_not(schema, compiles) is not None and len(compiled) == 1


def test_a_long_place_is_shown_by_its_end(tokenizer: Any) -> None:
    found = refusal(tokenizer, {"properties": {300 * "a": {"properties": {"b": {"not": {}}}}}})
    assert found.startswith("at …aaa") and "aaa/properties/b/not: " in found and found.index(": ") < 210
