"""Requests recorded from the `anthropic` package and those of coding agents are served.

`python -m tests.router.frontends.http.anthropic.record` writes the recorded ones again.
"""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from anthropic.types.beta import BetaThinkingConfigParam, message_count_tokens_params, message_create_params

from cluster.errors import (
    AttemptsExhaustedError,
    DeadlineError,
    ForbiddenError,
    RequestTooLargeError,
    UnauthenticatedError,
)
from router.frontends.http.anthropic.request import CountTokensRequest, MessagesRequest, ThinkingParam
from router.frontends.http.errors import error_response
from router.frontends.http.openai.requests import read_request
from router.request.answer_parts import ContentText
from tests.router.frontends.http.anthropic.events import ASK, events_of
from tests.router.frontends.http.anthropic.record import RECORDED, WEATHER

CACHED: Any = {"cache_control": {"type": "ephemeral"}}
REQUESTS: list[tuple[str, str, dict[str, str], dict[str, Any]]] = [
    tuple(json.loads(line)) for line in RECORDED.read_text().splitlines()
]
AGENT_HEADERS = {
    "x-api-key": "k",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
}
# A coding agent's, without its longer texts
AGENT: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32_000,
    "stream": True,
    "temperature": 1,
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Be brief and exact. " * 20, **CACHED},
    ],
    "tools": [{**WEATHER, "name": f"tool_{index}", "description": "Does a thing"} for index in range(20)]
    + [{**WEATHER, **CACHED}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday\n</system-reminder>"},
                {"type": "text", "text": "fix the test", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "baton"},
                {"type": "text", "text": "I read the test."},
                {"type": "tool_use", "id": "toolu_1", "name": "tool_1", "input": {"city": "a.py"}},
                {"type": "tool_use", "id": "toolu_2", "name": "tool_2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1\tassert x"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "<tool_use_error>", **CACHED}],
                },
            ],
        },
    ],
}


def shown(scripted, index=-1):
    return scripted.first.text.tokenizer.decode(
        scripted.accepted[index].prompt_tokens, skip_special_tokens=False
    )


def test_recorded_requests(scripted, client):
    scripted.script([ContentText("x")], "length")
    for name, path, headers, body in [*REQUESTS, ("agent", "/v1/messages?beta=true", AGENT_HEADERS, AGENT)]:
        answer = client.post(path, json=body, headers=headers)
        assert answer.status_code == 200, (name, answer.text)
        assert answer.headers["request-id"], name
        if "count_tokens" in path:
            assert answer.json()["input_tokens"] > 0 and answer.json().keys() == {"input_tokens"}
        elif body.get("stream"):
            events = events_of(
                [f"{one}\n\n".encode() for one in answer.text.removesuffix("\n\n").split("\n\n")]
            )
            assert [event["type"] for event in events] == [
                "message_start", "ping", "content_block_start", "content_block_delta",
                "content_block_stop", "message_delta", "message_stop",
            ], name  # fmt: skip
        else:
            message = answer.json()
            assert message["content"] == [{"type": "text", "text": "x"}], name
            assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
            assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")


def test_what_is_sent_reaches_the_model(scripted, client):
    scripted.script([])
    body = next(body for name, _, _, body in REQUESTS if name == "options")
    assert client.post("/v1/messages", json=body).status_code == 200
    (completion,) = scripted.accepted
    sampling = completion.sampling
    assert completion.stop == ("\n\nHuman:", "END")
    assert (sampling.temperature, round(sampling.top_p, 3), sampling.top_k) == (0.5, 0.9, 5)
    assert sampling.max_tokens == 8 and "Be brief" in shown(scripted)


def test_an_agents_max_tokens_ends_at_the_context(scripted, client):
    scripted.script([], "length")
    answer = client.post("/v1/messages", json={**AGENT, "stream": False})
    (completion,) = scripted.accepted
    context = scripted.first.validator.limits.max_model_len
    assert completion.sampling.max_tokens == context - len(completion.prompt_tokens) < 32_000
    assert answer.json()["stop_reason"] == "model_context_window_exceeded"
    text = shown(scripted)
    for part in ("You are a coding agent.", "fix the test", "assert x", "<tool_use_error>"):
        assert part in text


def test_the_count_is_that_of_the_request(scripted, client):
    scripted.script([])
    body = {key: AGENT[key] for key in ("model", "system", "tools", "messages", "thinking")}
    counted = client.post("/v1/messages/count_tokens", json=body).json()
    client.post("/v1/messages", json={**body, "max_tokens": 3})
    assert counted == {"input_tokens": len(scripted.accepted[0].prompt_tokens)}


def test_a_last_message_of_the_assistant_is_continued(scripted, client):
    scripted.script([])
    messages = [*ASK["messages"], {"role": "assistant", "content": "It is"}]
    client.post("/v1/messages", json={**ASK, "messages": messages})
    assert shown(scripted).endswith("It is")


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": ASK["messages"]}, 400, "max_tokens: is missing"),
    ({**ASK, "max_tokens": -1}, 400, "max_tokens: "),
    ({**ASK, "max_tokens": True}, 400, "max_tokens: "),
    ({**ASK, "model": "other"}, 404, "model: "),
    ({**ASK, "messages": []}, 400, "messages: "),
    ({**ASK, "messages": [{}] * 10_000}, 400, "messages: "),
    ({**ASK, "messages": [{"role": "user", "content": "word " * 100_000}]}, 400, "messages: "),
    (
        {**ASK, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        400,
        "messages.0.content.0.type: 'image'",
    ),
    ({**ASK, "system": 1}, 400, "system: "),
    ({**ASK, "tools": [WEATHER, {"type": "web_search_20250305"}]}, 400, "tools.1.type: web_search_20250305"),
    ({**ASK, "tools": [{"name": "a"}]}, 400, "tools.0.input_schema: is missing"),
    ({**ASK, "tools": [{**WEATHER, "name": "a b"}]}, 400, "tools.0.name: "),
    ({**ASK, "tools": [WEATHER, WEATHER]}, 400, "tools: two have the name"),
    ({**ASK, "tools": [WEATHER] * 129}, 400, "tools: at most 128"),
    ({**ASK, "tool_choice": {"type": "any"}}, 400, "tool_choice.type: any needs tools"),
    ({**ASK, "tool_choice": {"type": "required"}}, 400, "tool_choice.type: must be one of"),
    ({**ASK, "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "b"}}, 400, "tool_choice.name: "),
    ({**ASK, "tools": [WEATHER], "tool_choice": {"type": "tool"}}, 400, "tool_choice.name: "),
    ({**ASK, "thinking": {"type": "on"}}, 400, "thinking.type: must be one of"),
    ({**ASK, "output_config": {"format": {"type": "xml"}}}, 400, "output_config.format: "),
    ({**ASK, "stop_sequences": ["a"] * 1000}, 400, "stop_sequences: at most"),
    ({**ASK, "stop_sequences": ["x" * 10_000]}, 400, "stop_sequences: "),
    ({**ASK, "mcp_servers": [{}]}, 400, "mcp_servers: "),
    ({**ASK, "compaction": {"type": "summarize"}}, 400, "compaction: is not supported"),
    ({**ASK, "prompt": "a"}, 400, "prompt: unknown field"),
]


def test_refusals_name_their_fields(scripted, client):
    scripted.script([])
    for body, status, said in REFUSED:
        answer = client.post("/v1/messages", json=body)
        error = answer.json()
        assert answer.status_code == status, (said, error)
        assert error["error"]["message"].startswith(said), error
        assert error["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
        assert error["type"] == "error" and error["request_id"] == answer.headers["request-id"]
    assert not scripted.accepted


def test_a_deep_schema_is_refused_before_it_is_walked(scripted, client):
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"properties": {"a": deep}}
    answer = client.post("/v1/messages", json={**ASK, "tools": [{**WEATHER, "input_schema": deep}]})
    assert answer.status_code == 400 and "nested deeper" in answer.json()["error"]["message"]


def test_errors_of_other_methods_and_of_bodies_have_this_form(client):
    for answer, status in (
        (client.get("/v1/messages"), 405),
        (client.post("/v1/messages/batches", json={}), 404),
        (client.post("/v1/messages", content=b"{"), 400),
        (client.post("/v1/messages/count_tokens", content=b"[]"), 400),
    ):
        error = answer.json()
        assert (answer.status_code, error["type"]) == (status, "error")
        assert error["request_id"] == answer.headers["request-id"]


def test_a_clients_request_id_is_kept(scripted, client):
    scripted.script([])
    for body in (ASK, {}):
        answer = client.post("/v1/messages", json=body, headers={"x-request-id": "mine"})
        assert answer.headers.get_list("request-id") == ["mine"]
    assert answer.json()["request_id"] == "mine"
    assert scripted.accepted[0].request_id == "mine"


def test_thinking_sets_the_templates_variables():
    def kwargs(**thinking):
        values = {**ASK, "thinking": ThinkingParam(**thinking) if thinking else None}
        return MessagesRequest.model_construct(**values)._template_kwargs()

    assert kwargs() == kwargs(type="adaptive") == {}
    assert kwargs(type="enabled") == {"enable_thinking": True, "thinking": True}
    off = {"enable_thinking": False, "thinking": False}
    assert kwargs(type="disabled") == kwargs(type="between_tools") == off


def test_every_parameter_of_the_package_is_known():
    """Those that a request cannot have are refused by name, also where unknown fields are ignored."""
    headers = {"betas", "user_profile_id", "workspace_id"}
    for parameters, request_model in (
        (message_create_params.MessageCreateParamsBase, MessagesRequest),
        (message_count_tokens_params.MessageCountTokensParams, CountTokensRequest),
    ):
        assert parameters.__annotations__.keys() - headers <= request_model.names
    kinds = [get_type_hints(one)["type"] for one in get_args(BetaThinkingConfigParam)]
    known = get_args(ThinkingParam.model_fields["type"].annotation)
    assert {name for kind in kinds for name in get_args(kind)} <= set(known)


def test_a_refusal_before_the_endpoint_has_this_form():
    for error, status, kind in (
        (UnauthenticatedError("no key"), 401, "authentication_error"),
        (ForbiddenError("another origin"), 403, "permission_error"),
        (RequestTooLargeError("too large"), 413, "request_too_large"),
        (DeadlineError("late"), 504, "timeout_error"),
        (AttemptsExhaustedError("workers failed"), 529, "overloaded_error"),
    ):
        answer = error_response(error, "/v1/messages")
        body = json.loads(bytes(answer.body))
        assert (answer.status_code, body["error"]) == (status, {"type": kind, "message": error.message})
        assert body["request_id"] == answer.headers["request-id"]
    assert "x-should-retry" in answer.headers
    assert "type" not in json.loads(bytes(error_response(error, "/v1/messagesx").body))


def test_a_request_that_just_fits_ends_by_its_own_limit(scripted, client):
    scripted.script([], "length")
    counted = client.post("/v1/messages/count_tokens", json={"messages": ASK["messages"]}).json()
    room = scripted.first.validator.limits.max_model_len - counted["input_tokens"]
    for most, reason in ((room, "max_tokens"), (room + 1, "model_context_window_exceeded")):
        answer = client.post("/v1/messages", json={**ASK, "max_tokens": most})
        assert answer.json()["stop_reason"] == reason
        assert scripted.accepted[-1].sampling.max_tokens == room


def test_options_of_a_conversation_are_those_of_a_chat(scripted):
    limits = scripted.first.validator.limits
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = {**ASK, "tools": [WEATHER], "tool_choice": choice, "output_config": {"effort": "max"}}
    made = read_request(MessagesRequest, body, limits).conversation(limits)
    assert not made.parallel_tool_calls and made.reasoning_effort == "xhigh"
    plain = read_request(MessagesRequest, {**ASK, "output_config": {"effort": "low"}}, limits).conversation(
        limits
    )
    assert plain.parallel_tool_calls and plain.reasoning_effort == "low"
