"""Dates and times that a grammar allows are those that exist."""

from __future__ import annotations

import json
import re
from datetime import date, datetime
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from cluster.grammar.library import make_matcher, make_tokenizer
from cluster.grammar.rewriting import for_library
from cluster.grammar.spec import GrammarSpec
from router.text.conversation import Tool
from router.text.parsers import lark_rules
from router.text.parsers.grammars import tool_grammar
from router.text.parsers.lark_rules import json_rule

MODEL = Path(__file__).parents[3] / "demo" / "model"
DAY = {"type": "string", "format": "date"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer((MODEL / "tokenizer.json").read_text(), 4096, (2,))


def accepted(tokenizer: Any, matcher: Any, value: object) -> bool:
    tokens = tokenizer.tokenize_str(json.dumps(value, separators=(",", ":")))
    copy = matcher.deep_copy()
    return bool(
        copy.validate_tokens(tokens) == len(tokens) and copy.consume_tokens(tokens) and copy.is_accepting()
    )


def exists(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_date_is_a_day_of_the_calendar(tokenizer: Any) -> None:
    matcher = make_matcher(GrammarSpec("json_schema", json.dumps(DAY)), tokenizer)
    years = (
        "0000",
        "0001",
        "0004",
        "0010",
        "0100",
        "0400",
        "1900",
        "2000",
        "2023",
        "2024",
        "2100",
        "9996",
        "9999",
    )
    for year in years:
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year}-{month:02}-{day:02}"
                assert accepted(tokenizer, matcher, text) == exists(text), text
    leap = [year for year in range(1, 10_000) if accepted(tokenizer, matcher, f"{year:04}-02-29")]
    assert leap == [year for year in range(1, 10_000) if exists(f"{year:04}-02-29")]


def test_a_time_can_be_read(tokenizer: Any) -> None:
    matcher = make_matcher(GrammarSpec("json_schema", '{"type": "string", "format": "date-time"}'), tokenizer)
    for text in ("2024-02-29T23:59:59Z", "2023-12-31T00:00:00.125+05:30"):
        assert accepted(tokenizer, matcher, text) and datetime.fromisoformat(text)
    for text in ("2023-02-29T00:00:00Z", "0000-01-01T00:00:00Z", "2016-12-31T23:59:60Z", "2024-02-29"):
        assert not accepted(tokenizer, matcher, text), text
    time = make_matcher(GrammarSpec("json_schema", '{"type": "string", "format": "time"}'), tokenizer)
    assert accepted(tokenizer, time, "23:59:59Z") and not accepted(tokenizer, time, "23:59:60Z")


PLACES: dict[str, tuple[dict[str, Any], Any]] = {
    "property": ({"type": "object", "properties": {"a": DAY}, "required": ["a"]}, lambda text: {"a": text}),
    "item": ({"type": "array", "items": DAY}, lambda text: [text]),
    "reference": ({"$ref": "#/$defs/Day", "$defs": {"Day": DAY}}, lambda text: text),
    "union": ({"anyOf": [{"type": "null"}, DAY]}, lambda text: text),
    "pattern": ({**DAY, "pattern": "^2"}, lambda text: text),
    "length": ({**DAY, "maxLength": 10, "allOf": [{"pattern": "^2"}], "pattern": "9$"}, lambda text: text),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("within", ["json_schema", "lark"])
def test_days_that_do_not_exist_are_refused_at_every_place_of_a_schema(
    place: str, within: Any, tokenizer: Any
) -> None:
    """Also in the arguments of a call, whose schema is a part of another grammar."""
    schema, made = PLACES[place]
    text = json.dumps(schema) if within == "json_schema" else f"start: {json_rule(schema, spaced=False)}"
    matcher = make_matcher(GrammarSpec(within, text), tokenizer)
    assert accepted(tokenizer, matcher, made("2024-02-29"))
    assert not accepted(tokenizer, matcher, made("2023-02-29"))
    assert not accepted(tokenizer, matcher, made("1024-02-29")) or place not in ("pattern", "length")


def test_other_schemas_stay_as_they_were_written() -> None:
    for schema in ({"const": {"format": "date"}}, {"format": "uuid", "title": "date"}, {"enum": [DAY]}):
        assert json.loads(for_library(json.dumps(schema))) == schema
    text = '{"type": "string", "title": "a date"}'
    assert for_library(text) is text


def test_many_dates_are_compiled_in_the_time_of_a_trial(tokenizer: Any) -> None:
    """Counted in the library's bounds: beyond them it refuses."""
    names = [f"day_{number}" for number in range(100)]
    schema = {"type": "object", "properties": dict.fromkeys(names, DAY), "required": names}
    matcher = make_matcher(GrammarSpec("json_schema", json.dumps(schema)), tokenizer)
    assert accepted(tokenizer, matcher, dict.fromkeys(names, "2024-02-29"))
    assert len(re.findall("pattern", for_library(json.dumps(schema)))) == 100


def test_a_schema_that_is_too_long_is_not_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a router's event loop: 15,000 dates took 50 ms, before the grammar was refused for its length."""
    lengthened = MagicMock()
    monkeypatch.setattr(lark_rules, "for_library", lengthened)
    with pytest.raises(ValueError, match="the grammar of the answer has"):
        json_rule({"anyOf": [DAY] * 5000}, spaced=False)
    lengthened.assert_not_called()


def test_what_dates_make_too_long_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the grammar of the answer has"):
        json_rule({"anyOf": [DAY] * 1000}, spaced=False)


def test_tools_that_are_too_long_together_are_not_all_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a request may have would take the event loop for as long as one schema of 15,000 dates."""
    lengthened = MagicMock(wraps=for_library)
    monkeypatch.setattr(lark_rules, "for_library", lengthened)
    dates = {"properties": {f"day_{number}": DAY for number in range(100)}}
    with pytest.raises(ValueError, match="the grammar of the answer has"):
        tool_grammar(
            "hermes",
            [Tool(f"tool_{number}", None, dates) for number in range(128)],
            must_call=True,
            parallel=True,
            reasoning=None,
            marker=lark_rules.quoted,
        )
    assert 1 < lengthened.call_count < 8
