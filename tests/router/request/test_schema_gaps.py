"""Schemas whose answers the library would get wrong, or has no grammar for, are refused by their place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.spec import GrammarSpec
from router.request.grammar_verdict import tried
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
