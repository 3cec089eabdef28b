"""Bounds of tools, choices, template variables and messages with calls; HTTP and gRPC read the same conversation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError
from router.frontends.grpc.conversation import check_conversation, read_conversation
from router.frontends.http.anthropic.tools import read_tools as read_anthropic
from router.frontends.http.openai.requests import ChatCompletionRequest, read_request
from router.frontends.http.responses.input_items import read_items
from router.request import json_text
from router.request.json_scan import SCAN_BYTES, JsonScan
from router.request.json_text import INVALID_JSON, JsonTexts
from router.request.limits import FieldLimits
from router.request.messages import read_messages
from router.request.tools import MAX_KWARG_CHARACTERS, MAX_KWARG_NAME, MAX_KWARGS, MAX_NAME, check_size
from wire import inference_pb2 as pb

CONFIG = RouterConfig(model=Path("/models/m"), max_tools=2, max_tool_bytes=400, max_json_depth=8)
LIMITS = FieldLimits(CONFIG, "m", 1000, 100)
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c1", "name": "f"},
]


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(tool, names)]}}


def chat_request(**body: Any) -> ChatCompletionRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return read_request(ChatCompletionRequest, body, LIMITS)


def conversation(**body: Any) -> Any:
    return chat_request(**body).conversation(LIMITS)


@pytest.mark.parametrize("name", ["f" * MAX_NAME, "mcp__devtools_" + "x" * 60])
def test_names_may_have_what_anthropic_allows(name):
    """128 characters: names of MCP servers and their tools together are longer than 64."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    told = {"role": "tool", "content": "", "tool_call_id": "c1", "name": name}
    messages = [MESSAGES[0], {"role": "assistant", "tool_calls": [call]}, told]
    choice = {"type": "function", "function": {"name": name}}
    chat = conversation(messages=messages, tools=[tool(name)], tool_choice=choice)
    assert chat.tool_name == name == chat.messages[1]["tool_calls"][0]["function"]["name"]
    (read,) = read_anthropic([{"name": name, "input_schema": {"type": "object"}}], LIMITS)
    assert read.name == name
    with pytest.raises(InvalidRequestError, match="1 … 128 letters") as caught:
        read_anthropic([{"name": "f" * (MAX_NAME + 1), "input_schema": {}}], LIMITS)
    assert caught.value.field == "tools.0.name"


@pytest.mark.parametrize("name", ["get weather", "größe", "a/b", "f" * (MAX_NAME + 1)])
def test_a_name_that_a_model_made_up_is_sent_back(name):
    """On every endpoint: the client's loop answers the call with an error, and goes on."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    told = {"role": "tool", "content": "no such tool", "tool_call_id": "c1", "name": name}
    _, message, result = conversation(
        messages=[MESSAGES[0], {"role": "assistant", "tool_calls": [call]}, told]
    ).messages
    assert message["tool_calls"][0]["function"]["name"] == result["name"] == name
    item = {"type": "function_call", "call_id": "c1", "name": name, "arguments": "{}"}
    assert read_items([item], None, LIMITS)[0]["tool_calls"][0]["function"]["name"] == name
    chat = pb.ChatMessages()
    chat.messages.add(role="assistant").tool_calls.add(id="c1", name=name)
    assert read_conversation(chat, LIMITS).messages[0]["tool_calls"][0]["function"]["name"] == name


def test_http_and_grpc_read_the_same():
    http = conversation(
        messages=MESSAGES,
        tools=[tool(description="d", parameters=SCHEMA, strict=True)],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
    )
    call = pb.ToolCall(id="c1", name="f", arguments='{"x": 1}')
    chat = pb.ChatMessages(
        messages=[
            pb.ChatMessage(role="user", content="hi"),
            pb.ChatMessage(role="assistant", tool_calls=[call], reasoning="hm"),
            pb.ChatMessage(role="tool", content="5", tool_call_id="c1", name="f"),
        ],
        tools=[pb.Tool(name="f", description="d", parameters=json.dumps(SCHEMA), strict=True)],
        tool_name="f",
        parallel_tool_calls=False,
        template_kwargs='{"enable_thinking": false}',
        reasoning_effort="low",
    )
    check_conversation(chat, LIMITS)
    assert read_conversation(chat, LIMITS) == http
    (called,) = http.messages[1]["tool_calls"]
    assert called["function"]["arguments"] == {"x": 1}, "templates get the object"
    assert [one.name for one in http.callable] == ["f"] and http.must_call


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": [tool("a"), tool("b"), tool("c")]}, "tools"),
        ({"tools": [tool(description="x" * 400)]}, "tools"),
        ({"tools": [tool("a"), tool("a")]}, "tools"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("x" * 129)]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a\n")]}, "tools[0].function.name"),
        ({"tools": [tool(5)]}, "tools[0].function.name"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(strict=1)]}, "tools[0].function.strict"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "f", "tools": [tool()]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]},
            "tool_choice.function.name",
        ),
        (
            {"tool_choice": allowed("g"), "tools": [tool()]},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tool_choice": allowed("f", "f"), "tools": [tool()]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed(), "tools": [tool()]}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("f", mode="none"), "tools": [tool()]}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.allowed_tools"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {"raise_exception": 1}}, "chat_template_kwargs.raise_exception"),
        ({"chat_template_kwargs": {"a": []}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {"a": "x" * (MAX_KWARG_CHARACTERS + 1)}}, "chat_template_kwargs.a"),
        ({"chat_template_kwargs": {f"a{i}": 1 for i in range(MAX_KWARGS + 1)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a" * (MAX_KWARG_NAME + 1): 1}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**MESSAGES[1], "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
        (
            {"messages": [{**MESSAGES[1], "tool_calls": [{**CALL, "function": {"name": "a\nb"}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {
                "messages": [
                    {**MESSAGES[1], "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{**MESSAGES[1], "tool_calls": [{**CALL, "id": "x" * 257}]}]},
            "messages[0].tool_calls[0].id",
        ),
    ],
)
def test_each_bound_names_its_field(body, field):
    with pytest.raises(InvalidRequestError) as caught:
        conversation(**body)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "text", ["[]", "5", "{", '{"a": NaN}', "{" * 5000, '{"a":' + "[" * 8 + "]" * 8 + "}"]
)
def test_a_text_of_json_is_that_of_an_object(text):
    with pytest.raises(InvalidRequestError) as caught:
        JsonTexts(CONFIG).object(text, "arguments")
    assert caught.value.field == "arguments"


@pytest.mark.parametrize("text", ["[]", "5", '{"a', "no JSON", '{"a": NaN}'])
def test_arguments_of_an_earlier_call_may_be_cut(text):
    """An answer that max_tokens ended may be sent back as it came; templates get an object all the same."""
    given = {**CALL, "function": {"name": "f", "arguments": text}}
    (message,) = conversation(messages=[{**MESSAGES[1], "tool_calls": [given]}]).messages
    assert message["tool_calls"][0]["function"]["arguments"] == {INVALID_JSON: text}
    deep = {**CALL, "function": {"name": "f", "arguments": "[" * 100}}
    with pytest.raises(InvalidRequestError, match="max_json_depth"):
        conversation(messages=[{**MESSAGES[1], "tool_calls": [deep]}])


def test_the_arguments_of_all_calls_have_no_more_elements_than_a_body():
    """Over HTTP and gRPC: each text alone is within the limit."""
    limits = FieldLimits(CONFIG.model_copy(update={"max_json_elements": 100}), "m", 1000, 100)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    chat = pb.ChatMessages()
    read_messages([{"role": "assistant", "tool_calls": [call] * 2}], limits)
    message = chat.messages.add(role="assistant")
    for _ in range(2):
        message.tool_calls.add(id="c", name="f", arguments='{"a": 1, "b": 2}')
    read_conversation(chat, limits)
    with pytest.raises(InvalidRequestError, match="max_json_elements") as caught:
        read_messages([{"role": "assistant", "tool_calls": [call]}] * 3, limits)
    assert caught.value.field == "messages[2].tool_calls[0].function.arguments"
    message.tool_calls.add(id="c", name="f", arguments='{"a": 1, "b": 2}')
    with pytest.raises(InvalidRequestError, match="max_json_elements") as caught:
        read_conversation(chat, limits)
    assert caught.value.field == "chat.messages[0].tool_calls[2].arguments"
    item = {"type": "function_call", "name": "f", "arguments": '{"a": 1, "b": 2}'}
    with pytest.raises(InvalidRequestError, match="max_json_elements") as caught:
        read_items([{**item, "call_id": f"c{index}"} for index in range(3)], None, limits)
    assert caught.value.field.startswith("input[2]")


def test_tools_have_as_many_bytes_as_they_may():
    whole = [{"a": "x" * 192}, {"a": "x" * 192}]  # 200 bytes each
    check_size(whole, LIMITS)
    with pytest.raises(InvalidRequestError, match="more than 400 bytes"):
        check_size([*whole[:1], {"a": "x" * 193}], LIMITS)


def test_deep_schemas_are_refused():
    deep: dict[str, Any] = {}
    for _ in range(33):
        deep = {"items": deep}
    limits = FieldLimits(CONFIG.model_copy(update={"max_tool_bytes": 10000}), "m", 1000, 100)
    body = {"messages": [], "tools": [tool(parameters=deep)]}
    body["messages"] = [{"role": "user", "content": ""}]
    with pytest.raises(InvalidRequestError, match="32 levels") as caught:
        read_request(ChatCompletionRequest, body, limits).conversation(limits)
    assert caught.value.field == "tools[0].function.parameters"


def test_only_allowed_tools_are_left():
    tools = [tool("f"), tool("g")]
    both = conversation(tools=tools, tool_choice=allowed("g", "f"))
    assert [one.name for one in both.tools] == ["f", "g"] and not both.must_call
    one = conversation(tools=tools, tool_choice=allowed("g", mode="required"))
    assert [one.name for one in one.tools] == ["g"] and one.must_call
    assert not chat_request(tools=tools, tool_choice=allowed("g")).names_tool
    assert chat_request(tools=tools, tool_choice=tool("g")).names_tool


def test_a_refused_answer_is_sent_back():
    """As text: alone, or as a part beside other ones."""
    parts = [{"type": "text", "text": "No, "}, {"type": "refusal", "refusal": "I must not."}]
    assert read_messages([{"role": "assistant", "content": parts}], LIMITS)[0]["content"] == "No, I must not."
    with pytest.raises(InvalidRequestError) as caught:
        read_messages([{"role": "user", "content": parts}], LIMITS)
    assert caught.value.field == "messages[0].content"


def test_neutral_values_ask_for_nothing():
    plain = conversation()
    assert conversation(tools=[], tool_choice="auto", parallel_tool_calls=None) == plain
    assert conversation(tools=None, tool_choice=None, chat_template_kwargs={}) == plain
    assert conversation(tools=[tool()], tool_choice="none").callable == ()


def test_long_texts_are_measured_in_pieces(monkeypatch):
    """Of 8 MiB at once the interpreter lock was held for 0.2 s; what is beyond a limit is not looked at."""
    lengths = []

    class Counted(JsonScan):
        def read(self, piece):
            lengths.append(len(piece))
            super().read(piece)

    monkeypatch.setattr(json_text, "JsonScan", Counted)
    texts = JsonTexts(CONFIG)
    text = json.dumps({"a": 3 * SCAN_BYTES * "x", "b": '"\\' * SCAN_BYTES})
    assert texts.object(text, "arguments") == json.loads(text)
    assert sum(lengths) == len(text) and max(lengths) <= SCAN_BYTES
    lengths.clear()
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        texts.object("[" * 40 + 5 * SCAN_BYTES * " ", "arguments")
    assert len(lengths) == 1


def test_a_message_names_a_tool_or_a_choice():
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user")], tools=[pb.Tool(name="f")], tool_choice="auto", tool_name="f"
    )
    with pytest.raises(InvalidRequestError) as caught:
        read_conversation(chat, LIMITS)
    assert caught.value.field == "chat.tool_name"
