"""Blocks and events of an answer, from lists of parts."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from cluster.errors import InternalError
from router.frontends.http.anthropic.content import SIGNATURE, Content
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from tests.router.frontends.http.anthropic.events import events_of

ANSWER: list[Part] = [
    ReasoningText("They ask "),
    ReasoningText("for it."),
    ContentText("I look"),
    ContentText(" it up."),
    CallBegin(0, "call_a", "get_weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, '"Bern"}'),
    CallBegin(1, "call_b", "now"),
]


def run(parts: list[Part], size: int = 1, **more: Any) -> tuple[Content, list[dict[str, Any]]]:
    content = Content(**more)
    frames: list[bytes] = []
    for begin in range(0, len(parts), size):
        frames += content.add(parts[begin : begin + size])
    return content, events_of(frames + content.end())


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks as a client makes them from the events; one block is open at a time."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        kind = event["type"]
        assert is_open == (kind != "content_block_start")
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_stop":
            block, is_open = blocks[-1], False
            if text := block.pop("json"):
                block["input"] = json.loads(text)
            continue
        delta = event["delta"]
        match delta["type"]:
            case "text_delta":
                blocks[-1]["text"] += delta["text"]
            case "thinking_delta":
                blocks[-1]["thinking"] += delta["thinking"]
            case "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            case "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
    assert not is_open
    return blocks


def shown(content: Content) -> Any:
    return orjson.loads(orjson.dumps(content.done))


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_events_and_blocks_are_the_same_answer(size):
    content, events = run(ANSWER, size)
    assert rebuilt(events) == shown(content)
    assert shown(content) == [
        {"type": "thinking", "thinking": "They ask for it.", "signature": SIGNATURE},
        {"type": "text", "text": "I look it up."},
        {"type": "tool_use", "id": "call_a", "name": "get_weather", "input": {"city": "Bern"}},
        {"type": "tool_use", "id": "call_b", "name": "now", "input": {}},
    ]
    assert SIGNATURE  # some clients drop thinking blocks without one


def test_empty_pieces_open_no_block():
    content, events = run([ContentText(""), ReasoningText("")])
    assert events == [] and content.done == []


def test_omitted_thinking_is_an_empty_block():
    content, events = run(ANSWER[:3], omit_thinking=True)
    assert shown(content)[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    assert not [event for event in events if event.get("delta", {}).get("type") == "thinking_delta"]


@pytest.mark.parametrize(
    "arguments",
    ['{"city": "Be', "[1]", '"a"', "{}}", '{"a": NaN}', '{"a": 1e400', "[1e400]", '\ufeff{"a": 1.5}'],
)
def test_arguments_that_are_no_object_are_kept_as_text(arguments):
    content, _ = run([CallBegin(0, "call_a", "f"), CallArguments(0, arguments)])
    assert shown(content)[0]["input"] == {"INVALID_JSON": arguments}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" * 400, "1.10", "1e-400"])
def test_numbers_of_arguments_stay_as_they_were_written(number):
    """Also those that are no number of this machine: the arguments are JSON all the same."""
    content, _ = run([CallBegin(0, "call_a", "f"), CallArguments(0, f'{{"n": {number}}}')])
    assert f'"input":{{"n": {number}}}' in orjson.dumps(content.done[0]).decode()


def test_deep_arguments_are_encoded():
    deep = '{"a":' * 300 + "1" + "}" * 300
    content, _ = run([CallBegin(0, "call_a", "f"), CallArguments(0, deep)])
    found = shown(content)[0]["input"]
    for _ in range(300):
        found = found["a"]
    assert found == 1


def test_arguments_of_a_call_that_is_not_open_are_a_fault():
    with pytest.raises(InternalError):
        run([CallBegin(0, "call_a", "f"), CallArguments(1, "{}")])
