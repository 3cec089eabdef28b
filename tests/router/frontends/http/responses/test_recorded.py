"""Requests recorded from the `openai` package and coding agents are served, and the package reads the answers.

`python -m tests.router.frontends.http.responses.record` writes the recorded ones again.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.errors import OverloadedError, UnavailableError
from cluster.security.keys import Caller
from router.admission import admission
from router.frontends.http.openapi.document import build_document
from router.frontends.http.responses import endpoint
from router.request.answer_parts import ContentText
from tests.harness.waiting import wait_for
from tests.router.frontends.http.responses.conftest import ScriptedDispatcher, ScriptedGateway
from tests.router.frontends.http.responses.record import RECORDED

NAMES = [json.loads(line)[0] for line in RECORDED.read_text().splitlines()]
BODIES: dict[str, Any] = dict(json.loads(line) for line in RECORDED.read_text().splitlines())
# Codex's, without its longer texts
BODIES["codex"] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>"}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": None},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "call_7",
        },
        {"type": "function_call_output", "call_id": "call_7", "output": '{"output":"a.py","metadata":{}}'},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def gateway(scripted: ScriptedGateway) -> ScriptedGateway:
    scripted.script([ContentText("x")], "length")
    return scripted


def _post(gateway: ScriptedGateway, *bodies: Any) -> list[httpx.Response]:
    with httpx.Client(timeout=60) as client:
        return [client.post(f"{gateway.url}/responses", json=body) for body in bodies]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_recorded_requests(gateway):
    answers = _post(gateway, *BODIES.values())
    for (name, body), answer in zip(BODIES.items(), answers, strict=True):
        assert answer.status_code == 200, (name, answer.text)
        if body.get("stream"):
            events = events_of(answer)
            kinds = [event["type"].removeprefix("response.") for event in events]
            assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "incomplete", name
            response = events[-1]["response"]
        else:
            response = answer.json()
        Response.model_validate(response)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["store"] is False and response["previous_response_id"] is None
        (message,) = response["output"]
        assert message["content"][0]["text"] == "x" and message["status"] == "incomplete"
        for field in (
            "tools",
            "instructions",
            "metadata",
            "parallel_tool_calls",
            "temperature",
            "top_p",
            "tool_choice",
        ):
            if field in body:
                assert response[field] == body[field], (name, field)
        logprobs = message["content"][0]["logprobs"]
        assert bool(logprobs) is (name == "logprobs")


def test_the_begin_has_no_output_and_the_end_has_all(gateway):
    (answer,) = _post(gateway, {"input": "hi", "stream": True, "instructions": "brief"})
    events = events_of(answer)
    begun, ended = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert begun["id"] == ended["id"] and begun["instructions"] == "brief"
    assert "baton" in ended and "baton" not in begun
    assert ended["usage"].keys() == {
        "input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens",
    }  # fmt: skip


TOOL = {"type": "function", "name": "f", "parameters": {}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "is missing"),
    ({"input": []}, "input", "non-empty"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "no response is stored"),
    ({"input": "a", "conversation": "conv_1"}, "conversation", "no response is stored"),
    ({"input": "a", "background": True}, "background", "not supported"),
    ({"input": "a", "tools": [TOOL, {"type": "web_search"}]}, "tools[1].type", "web_search"),
    ({"input": "a", "tools": [{"type": "file_search"}]}, "tools[0].type", "file_search"),
    ({"input": "a", "tools": {}}, "tools", "must be a list"),
    ({"input": "a", "tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    ({"input": "a", "tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
    ({"input": "a", "text": {"format": {"type": "xml"}}}, "text.format", "its type must be"),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}},
        "text.format",
        "schema must be",
    ),
    (
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "schema": {"items": {"uniqueItems": True}}}},
        },
        "text.format",
        "/items/uniqueItems",
    ),
    ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", "must be one of"),
    ({"input": "a", "include": ["file"]}, "include[0]", "'file'"),
    ({"input": "a", "include": ["reasoning.encrypted_content"] * 33}, "include", "at most 32"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata", "must be strings"),
    ({"input": "a", "metadata": {"a": "x" * 513}}, "metadata", "512"),
    ({"input": "a", "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"input": "a", "top_logprobs": 2}, "top_logprobs", "needs message.output_text.logprobs"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "outside"),
    ({"input": "a", "max_output_tokens": 10**6}, "max_output_tokens", "exceed the context"),
    ({"input": "a", "truncation": "some"}, "truncation", "must be one of"),
    ({"input": "word " * 100_000}, "input", "context"),
    ({"input": [{}] * 10_000}, "input", "do not fit"),
    ({"input": "a", "messages": []}, "messages", "unknown field"),
    ({"input": "a", "n": 2}, "n", "not supported"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
        "input_file",
    ),
]


def test_refusals_name_their_fields(gateway):
    answers = _post(gateway, *(body for body, _, _ in REFUSED))
    for (_, field, said), answer in zip(REFUSED, answers, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), error
        assert said in error["message"], error


def test_a_long_conversation_is_shortened_where_it_may_be(gateway):
    context = gateway.first.validator.limits.max_model_len
    turn = [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "word " * 100}]
    body = {
        "input": [*turn * (context // 100), {"role": "user", "content": "the last"}],
        "max_output_tokens": 9,
    }
    gateway.accepted.clear()
    kept, refused = _post(gateway, {**body, "instructions": "first", "truncation": "auto"}, body)
    assert kept.status_code == 200, kept.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    (accepted,) = gateway.accepted
    assert context // 2 < len(accepted.prompt_tokens) <= context - 9
    shown = gateway.first.text.tokenizer.decode(accepted.prompt_tokens, skip_special_tokens=False)
    assert "first" in shown and "the last" in shown


def test_a_shortened_conversation_is_rendered_twice_and_each_time_counts(gateway, monkeypatch):
    """Though its last turns have far more tokens per character than those that are left out."""
    context = gateway.first.validator.limits.max_model_len
    old, new = "word " * (context // 20), "\u16a0" * (context // 30)
    turns = [{"role": "user", "content": text} for text in (*[old] * 40, *[new] * 8, "the last")]
    made: list[str] = []
    chat, counted = gateway.first.text.chat, gateway.counted

    async def rendered(*given: Any, **named: Any) -> Any:
        made.append("rendered")
        return await chat(*given, **named)

    def charged(caller: Caller, model: str) -> Any:
        made.append("charged")
        return counted(caller, model)

    monkeypatch.setattr(gateway.first.text, "chat", rendered)
    monkeypatch.setattr(gateway, "counted", charged)
    gateway.accepted.clear()
    (kept,) = _post(gateway, {"input": turns, "max_output_tokens": 9, "truncation": "auto"})
    assert kept.status_code == 200, kept.text
    assert made == ["rendered", "charged", "rendered"]
    (accepted,) = gateway.accepted
    assert context // 2 < len(accepted.prompt_tokens) <= context - 9


def test_the_document_describes_requests_answers_and_events(gateway):
    document = build_document(gateway)

    def valid(value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)

    bodies = [*BODIES.values(), BODIES["second turn"] | {"stream": True}]
    for body, answer in zip(bodies, _post(gateway, *bodies), strict=True):
        valid(body, "ResponseRequest")
        if body.get("stream"):
            for event in events_of(answer):
                valid(event, "ResponseEvent")
        else:
            valid(answer.json(), "Response")


def test_a_key_decides_priority_and_what_is_shown(gateway, monkeypatch):
    monkeypatch.setattr(endpoint, "caller_of", lambda request: Caller())  # without rights
    refused, allowed = _post(gateway, {"input": "a", "priority": "high"}, {"input": "a", "priority": "batch"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "priority")
    assert gateway.accepted[-1].priority < 0
    assert "prefill_worker" not in allowed.json()["baton"]
    monkeypatch.undo()
    (shown,) = _post(gateway, {"input": "a"})
    assert "prefill_worker" in shown.json()["baton"]


def test_a_request_takes_a_place_and_gives_it_back(gateway, monkeypatch):
    (refused,) = _post_full(gateway, monkeypatch)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    monkeypatch.undo()
    (served,) = _post(gateway, {"input": "a"})
    assert served.status_code == 200
    # The client has the answer a moment before the router knows that
    wait_for(lambda: gateway.admission.in_flight == 0, 10, "its place is free")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [None, UnavailableError("gone")])
def test_what_the_answer_repeats_counts_as_its_body_until_it_ends(gateway, monkeypatch, stream, error):
    during: list[int] = []
    start, bodies = ScriptedDispatcher.start, gateway.admission.bodies

    def started(dispatcher: Any, deltas: Any) -> None:
        during.append(bodies.held)
        start(dispatcher, deltas)

    monkeypatch.setattr(ScriptedDispatcher, "start", started)
    gateway.script([ContentText("a")], error=error)
    monkeypatch.setattr(admission, "FREE_BYTES", 1000)
    text = "word " * 400
    for body in ({"input": "a", "instructions": text}, {"input": text}):
        _post(gateway, body | {"stream": stream})
        # The client has the answer a moment before the router knows that
        wait_for(lambda: bodies.held == 0, 10, "the answer has ended")
    assert 1000 < during[0] < 2000, "the instructions are shown again, the input is not"
    assert during[1:] == [0]


def _post_full(gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch) -> list[httpx.Response]:
    def full(*_: Any) -> Any:
        raise OverloadedError("full")

    monkeypatch.setattr(gateway.admission, "admit", full)
    return _post(gateway, {"input": "a"})
