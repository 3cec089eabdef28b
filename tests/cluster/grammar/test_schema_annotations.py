"""Annotations and neutral values go, and nothing else; the formats that the library has are still enforced."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

from cluster.errors import InvalidRequestError
from cluster.grammar.annotations import FORMATS, without_annotations
from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import GrammarSpec
from tests.harness.model_text import VOCAB, make_model_text


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    text = (make_model_text(tmp_path_factory.mktemp("model")) / "tokenizer.json").read_text()
    tokenizer, encode = make_tokenizer(text, VOCAB, (2,)), Tokenizer.from_str(text).encode

    def accepts(schema: Any, answer: str) -> bool:
        matcher = make_matcher(GrammarSpec("json_schema", json.dumps(schema)), tokenizer)
        tokens = encode(answer, add_special_tokens=False).ids
        return matcher.validate_tokens(tokens) == len(tokens)

    return accepts


def stripped(schema: Any) -> Any:
    return orjson.loads(without_annotations(orjson.dumps(schema).decode()))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_these_formats_are_enforced(compiled, name):
    schema = {"type": "string", "format": name}
    assert stripped(schema) == schema
    assert not compiled(schema, '"^ no format has this"')


OTHERS = [
    "password", "binary", "byte", "path", "uuid4", "multi-host-uri", "ipvanyaddress", "json-string", "regex", "iri",
    "uri-reference", "uri-template", "idn-email", "idn-hostname", "json-pointer", "relative-json-pointer",
]  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_annotations(compiled, name):
    schema = {"type": "string", "format": name, "maxLength": 3}
    with pytest.raises(InvalidRequestError, match="Unknown format"):
        compiled(schema, '"a"')
    assert stripped(schema) == {"type": "string", "maxLength": 3}


NEUTRAL = [
    {"uniqueItems": False}, {"dependentRequired": {}}, {"dependentSchemas": {}}, {"dependencies": {}}, {"not": False},
    {"propertyNames": True}, {"propertyNames": {}}, {"propertyNames": {"type": "string"}}, {"unevaluatedItems": True},
    {"unevaluatedProperties": {}}, {"minContains": 2}, {"maxContains": 1}, {"if": {"type": "null"}}, {"then": False},
    {"else": False}, {"then": {}, "else": {}}, {"format": "x"},
]  # fmt: skip


@pytest.mark.parametrize("neutral", NEUTRAL, ids=map(json.dumps, NEUTRAL))
def test_neutral_values_go_wherever_a_schema_is(neutral):
    whole = {
        "type": "object",
        "properties": {"a": {}},
        "$defs": {"d": {"items": {}}},
        "anyOf": [{}],
        "title": "t",
    }
    given = {
        **whole,
        **neutral,
        "properties": {"a": neutral},
        "$defs": {"d": {"items": neutral}},
        "anyOf": [neutral],
    }
    assert stripped(given) == whole


def test_neutral_values_go_where_references_lead():
    parts = {"a/b": [{"uniqueItems": False, "items": {"format": "x"}}], "c": {"format": "x"}}
    schema = {"components": parts, "items": {"$ref": "#/components/a~1b/0"}}
    left = {"a/b": [{"items": {}}], "c": {"format": "x"}}
    assert stripped(schema) == {**schema, "components": left}


KEPT = [
    {"uniqueItems": True}, {"uniqueItems": 0}, {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {}}},
    {"not": {}}, {"not": True}, {"propertyNames": False}, {"propertyNames": {"maxLength": 3}},
    {"unevaluatedProperties": False}, {"unevaluatedItems": {"type": "null"}}, {"contains": {}, "minContains": 0},
    {"if": {}, "then": False}, {"if": {}, "else": False}, {"format": "date"}, {"format": 5},
    {"properties": {"format": {"type": "string"}, "not": {"type": "null"}}, "required": ["format"]},
    {"enum": [{"format": "x", "uniqueItems": False}]}, {"const": {"if": 1}}, {"default": {"format": "x"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", KEPT, ids=map(json.dumps, KEPT))
def test_nothing_else_does(schema):
    assert stripped(schema) == schema
    text = orjson.dumps(schema).decode()
    assert without_annotations(text) is text
