"""Tools of a conversation and parts of its answer, as the client library sends and returns them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.client.progress import StreamProgress
from baton.client.request import generate_request
from baton.client.types import CallPiece, ToolCall
from cluster.errors import InvalidRequestError
from wire import common_pb2
from wire import inference_pb2 as pb

SCHEMA = {"type": "object"}
TOOLS: Any = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}]
CALL: Any = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: Any = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
    {"role": "tool", "content": "5", "tool_call_id": "c"},
]


def test_tools_are_fields_of_the_conversation():
    options: Any = {"tools": TOOLS, "tool_choice": "f", "template_kwargs": {"a": 1}, "max_tokens": 3}
    chat = generate_request(MESSAGES, options).chat
    (tool,) = chat.tools
    assert (tool.name, tool.description, json.loads(tool.parameters)) == ("f", "d", SCHEMA)
    assert (chat.tool_name, chat.tool_choice, chat.template_kwargs) == ("f", "", '{"a": 1}')
    assert chat.messages[1].tool_calls[0] == pb.ToolCall(id="c", name="f", arguments="{}")
    assert (chat.messages[1].content, chat.messages[1].reasoning) == ("", "hm")
    assert chat.messages[2].tool_call_id == "c"
    required = generate_request(MESSAGES, {"tools": TOOLS, "tool_choice": "required"}).chat
    assert (required.tool_choice, required.tool_name) == ("required", "")
    with pytest.raises(InvalidRequestError) as caught:
        generate_request("text", {"tools": TOOLS})
    assert caught.value.field == "tools"


def event(position: int, text: str, finish: str = "", **parts: Any) -> pb.GenerateResponse:
    made = [pb.Part(**{name: value}) for name, value in parts.items()]
    token = common_pb2.Token(position=position)
    return pb.GenerateResponse(chunk=pb.Chunk(text=text, tokens=[token], finish_reason=finish, parts=made))


def test_an_answer_has_content_reasoning_and_calls():
    progress = StreamProgress(pb.GenerateRequest(), 0)
    progress.feed(pb.GenerateResponse(started=pb.Started(parsed=True)))
    begin, arguments = pb.CallBegin(id="c", name="f"), pb.CallArguments(text="{}")
    chunks = [
        progress.feed(event(0, "hm", reasoning="hm")),
        progress.feed(event(1, "held")),
        progress.feed(event(2, " text", content="held text")),
        progress.feed(event(3, "f{}", "tool_calls", call=begin, arguments=arguments)),
    ]
    assert [one.content for one in chunks if one] == ["", "", "held text", ""]
    assert chunks[3] is not None
    assert chunks[3].calls == (CallPiece(0, "", "c", "f"), CallPiece(0, "{}"))
    progress.feed(pb.GenerateResponse(completed=pb.Completed(usage=pb.Usage(reasoning_tokens=1))))
    completion = progress.completion()
    (choice,) = completion.choices
    assert (choice.content, choice.reasoning) == ("held text", "hm")
    assert choice.tool_calls == (ToolCall("c", "f", "{}"),)
    assert (choice.finish_reason, completion.usage.reasoning_tokens) == ("tool_calls", 1)


def test_an_answer_that_is_not_parsed_is_content():
    progress = StreamProgress(pb.GenerateRequest(), 0)
    progress.feed(pb.GenerateResponse(started=pb.Started()))
    chunk = progress.feed(event(0, "text"))
    assert chunk is not None and (chunk.content, chunk.calls) == ("text", ())
