"""Answers of an engine that must contain a call: valid at any temperature, and the same wherever they go on."""

from __future__ import annotations

import json

import jsonschema
import pytest

from engine.request import FinishReason
from router.text.conversation import Tool
from router.text.parsers.grammars import tool_grammar
from tests.engine.grammars import grammar_engine, grammar_request, serve

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def spec():
    tools = [Tool("weather", None, SCHEMA)]
    return tool_grammar("hermes", tools, must_call=True, parallel=False, reasoning=None, marker=json.dumps)


@pytest.mark.parametrize("cut", [1, 60])
def test_a_demanded_call_is_valid_and_goes_on_after_a_resume(model, spec, cut):
    answers = serve(grammar_engine(model), grammar_request("r", spec, temperature=1.0))
    assert answers.error("r") is None and answers.finish("r") is FinishReason.STOP
    text = answers.text("r")
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert call["name"] == "weather"
    jsonschema.validate(call["arguments"], SCHEMA)
    ids = answers.ids("r")
    resumed = serve(
        grammar_engine(model), grammar_request("r", spec, temperature=1.0, output_tokens=ids[:cut])
    )
    assert ids[:cut] + resumed.ids("r") == ids
