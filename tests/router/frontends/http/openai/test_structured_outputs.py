"""vLLM's `structured_outputs`: flags beside the grammar."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError
from cluster.grammar.spec import GrammarSpec
from router.frontends.http.openai.requests import CompletionRequest, read_request
from router.request.limits import FieldLimits

TEXT: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64)
LIMITS = FieldLimits.of(RouterConfig(model="m", secret="x" * 16), TEXT)
GRAMMARS: list[dict[str, Any]] = [
    {"json": {"type": "object"}},
    {"json": '{"type":"object"}'},
    {"json_object": True},
    {"regex": "a b"},
    {"choice": ["a", "b"]},
    {"grammar": 'start: "a"'},
]


def spec_of(given: dict[str, Any]) -> GrammarSpec:
    asked = read_request(
        CompletionRequest, {"prompt": "a", "structured_outputs": given}, LIMITS
    ).asked_grammar
    assert asked is not None and asked.field == "structured_outputs"
    return asked.spec


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("value", [True, False, None])
@pytest.mark.parametrize("flag", ["disable_any_whitespace", "disable_fallback"])
def test_what_holds_anyway_may_be_asked_for(grammar: dict[str, Any], flag: str, value: bool | None) -> None:
    """JSON is always compact, and there is no other library to fall back to."""
    assert spec_of({**grammar, flag: value}) == spec_of(grammar)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"regex": "a", "disable_fallback": 1}, "disable_fallback must be true or false"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "disable_any_whitespace must be true or false"),
        ({"disable_any_whitespace": True}, "must have one of json"),
        (
            {"json": {}, "disable_additional_properties": True},
            "disable_additional_properties is not supported",
        ),
        ({"json": {}, "whitespace_pattern": " *"}, "whitespace_pattern is not supported"),
        # What llguidance makes of a schema there may have white space
        (
            {"grammar": "start: %json {}", "disable_any_whitespace": True},
            "disable_any_whitespace is not supported",
        ),
    ],
)
def test_other_flags_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(given)
    assert caught.value.field == "structured_outputs" and said in caught.value.message


def test_a_grammar_with_a_schema_may_leave_white_space_allowed() -> None:
    assert spec_of({"grammar": "start: %json {}", "disable_any_whitespace": False}).kind == "lark"
