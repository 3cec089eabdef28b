"""Answers of an engine that must contain a call: valid at any temperature, and the same wherever they go on."""

from __future__ import annotations

import json

import jsonschema
import pytest

from cluster.grammar.spec import GrammarSpec
from engine.request import FinishReason
from router.text.conversation import Tool
from router.text.parsers.grammars import tool_grammar
from tests.engine.sampling.grammar.grammars import grammar_engine, grammar_request, serve

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


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calls_or_an_answer_by_a_schema_are_valid_and_go_on_after_a_resume(model, seed):
    answer = GrammarSpec("json_schema", json.dumps(SCHEMA))
    spec = tool_grammar(
        "hermes",
        [Tool("weather", None, SCHEMA, strict=True)],
        must_call=False,
        parallel=False,
        reasoning=None,
        marker=json.dumps,
        answer=answer,
    )
    engine = grammar_engine(model)
    answers = serve(engine, grammar_request("r", spec, temperature=1.0, seed=seed))
    assert answers.error("r") is None and answers.finish("r") is FinishReason.STOP
    text = answers.text("r")
    call = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    value = json.loads(call)
    jsonschema.validate(value if call == text else value["arguments"], SCHEMA)
    ids = answers.ids("r")
    for cut in (1, len(ids) // 2):
        request = grammar_request("r", spec, temperature=1.0, seed=seed, output_tokens=ids[:cut])
        assert ids[:cut] + serve(grammar_engine(model), request).ids("r") == ids
