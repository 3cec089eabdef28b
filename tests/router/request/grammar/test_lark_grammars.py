"""Grammars in Lark's syntax: what of them is refused before they are compiled."""

from __future__ import annotations

import pytest

from cluster.grammar.spec import GrammarSpec
from router.request.grammar.requested import lark_spec


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"grammars": [{"json_schema": {"uniqueItems": true}}]}', "must be in Lark's syntax, not JSON"),
        ('\u2028\n {"grammars": [{"lark_grammar": "start: /a/"}]}', "must be in Lark's syntax, not JSON"),
        ('start: %json {"oneOf": [{}, {}], "x-guidance": {"coerce_one_of": true}}', "has x-guidance"),
        ('start: %json\n{"\\u0078-guid\\u0061nce": {"lenient": true}, "not": {}}', "has x-guidance"),
        ('root ::= "a" | b\n', "must be in Lark's syntax, with rules .* not in GBNF's"),
        ('# rules\n\n  b-c::= "a"', "not in GBNF's"),
        ('\0start: "a"', r"has no U\+0000"),
        ("", "non-empty"),
        ({}, "non-empty"),
    ],
)
def test_a_grammar_in_larks_syntax_sets_no_options_of_the_library(text, reason):
    with pytest.raises(ValueError, match=reason):
        lark_spec(text)


@pytest.mark.parametrize(
    "text",
    [
        'start: "x-guidance"',
        'start: %json {"type": "null"}',
        'start: "{" /a/ "}"',
        'start: "a ::= b"\n// a ::= b',
    ],
)
def test_other_texts_are_grammars(text):
    assert lark_spec(text) == GrammarSpec("lark", text)
