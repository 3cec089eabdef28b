"""/openapi.json describes the answers of these endpoints."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from router.frontends.http.openapi.answers import answer_schemas
from router.frontends.http.openapi.document import build_document, request_schemas
from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from tests.router.frontends.http.anthropic.events import ASK, events_of
from tests.router.frontends.http.anthropic.record import WEATHER

PARTS = [
    ReasoningText("a"),
    ContentText("b"),
    CallBegin(0, "call_1", "get_weather"),
    CallArguments(0, '{"city":"Bern"}'),
]


@pytest.fixture(scope="module")
def check(scripted):
    document = build_document(scripted)

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(value, schema)

    return check


def test_no_two_schemas_have_one_name(scripted):
    asked, answered = request_schemas(scripted.first.validator.limits), answer_schemas(scripted)
    assert not asked.keys() & answered.keys()


def test_answers_and_events_and_errors(scripted, client, check):
    scripted.script(PARTS, "tool_calls")
    body = {**ASK, "tools": [WEATHER]}
    check("MessagesRequest", body)
    check("MessagesAnswer", client.post("/v1/messages", json=body).json())
    stream = client.post("/v1/messages", json={**body, "stream": True}).text
    for event in events_of([f"{one}\n\n".encode() for one in stream.removesuffix("\n\n").split("\n\n")]):
        check("MessagesAnswerEvent", event)
    check("MessageError", client.post("/v1/messages", json={}).json())
    counted = client.post("/v1/messages/count_tokens", json={"messages": ASK["messages"]})
    check("MessageTokens", counted.json())
    check("Tokens", client.post("/tokenize", json={"prompt": "a", "return_token_strs": True}).json())
    check("Tokens", client.post("/tokenize", json={"messages": ASK["messages"]}).json())
    check("Text", client.post("/detokenize", json={"tokens": [5]}).json())
