"""Parts become items, and the events announce exactly them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InternalError
from router.frontends.http.connection.long_body import Lists
from router.frontends.http.responses.input_items import read_items
from router.frontends.http.responses.output_items import OutputItems
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.limits import FieldLimits

LIMITS = FieldLimits(RouterConfig(model=Path("/models/m")), "m", 64, 512)
ANSWERS: dict[str, list[Part]] = {
    "nothing": [],
    "content": [ContentText("a"), ContentText(""), ContentText("b")],
    "reasoning alone": [ReasoningText("r")],
    "reasoning and content": [ReasoningText("r"), ReasoningText("s"), ContentText("a")],
    "call": [CallBegin(0, "c0", "f"), CallArguments(0, '{"x":'), CallArguments(0, "1}")],
    "call without arguments": [CallBegin(0, "c0", "f"), CallArguments(0, "")],
    "all": [
        ReasoningText("r"),
        ContentText("a"),
        CallBegin(0, "c0", "f"),
        CallArguments(0, "{}"),
        CallBegin(1, "c1", "g"),
        CallArguments(1, "{}"),
        ContentText("b"),
    ],
}


LISTS = Lists()


def plain(value: Any) -> Any:
    return orjson.loads(b"".join(LISTS.encode(value)))


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client adds them up from deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        index = event["output_index"]
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert index == len(items)
                items.append(event["item"])
            case "content_part.added":
                assert event["content_index"] == len(items[index]["content"]) == 0
                assert event["item_id"] == items[index]["id"]
                items[index]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                items[index]["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[index]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[index]["content"][0]["text"]
            case "function_call_arguments.done":
                assert event["arguments"] == items[index]["arguments"]
            case "content_part.done":
                assert event["part"]["text"] == items[index]["content"][0]["text"]
            case "output_item.done":
                items[index]["status"] = event["item"]["status"]
                assert event["item"] == items[index]
            case other:
                raise AssertionError(other)
    return items


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ANSWERS)
def test_the_events_add_up_to_the_items(name, whole):
    parts = ANSWERS[name]
    output = OutputItems(LISTS)
    events = [event for part in parts for event in output.add([part])] + output.end(whole=whole)
    items = plain(output.done)
    assert rebuilt(plain(events)) == items
    statuses = [item["status"] for item in items]
    assert statuses == ["completed"] * (len(items) - 1) + ["completed" if whole else "incomplete"]
    # However the parts arrive
    together = OutputItems(LISTS)
    same = plain(together.add(parts) + together.end(whole=whole))
    assert [event["type"] for event in same] == [event["type"] for event in plain(events)]


def test_items_are_the_answers_kinds_in_order():
    output = OutputItems(LISTS)
    output.add(ANSWERS["all"])
    output.end(whole=True)
    items = plain(output.done)
    assert [item["type"] for item in items] == [
        "reasoning", "message", "function_call", "function_call", "message",
    ]  # fmt: skip
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "r"}] and items[0]["summary"] == []
    assert items[0]["encrypted_content"] is None
    assert (items[2]["call_id"], items[2]["name"], items[2]["arguments"]) == ("c0", "f", "{}")
    assert len({item["id"] for item in items}) == 5
    assert [item["id"].split("_")[0] for item in items] == ["rs", "msg", "fc", "fc", "msg"]


def test_an_empty_answer_is_an_empty_message():
    output = OutputItems(LISTS)
    output.end(whole=True)
    (item,) = plain(output.done)
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


@pytest.mark.parametrize("parts", [[CallArguments(0, "x")], [CallBegin(0, "c", "f"), CallArguments(1, "x")]])
def test_arguments_without_their_call_are_a_fault(parts):
    with pytest.raises(InternalError):
        OutputItems(LISTS).add(parts)


@pytest.mark.parametrize("strip", [None, "content", "encrypted_content"])
def test_an_answer_can_be_sent_back(strip):
    """With the reasoning's text, or only what stands for it."""
    output = OutputItems(LISTS, encrypt_reasoning=True)
    output.add(ANSWERS["all"])
    output.end(whole=True)
    items = plain(output.done)
    if strip:
        items[0].pop(strip)
    messages = read_items(items, None, LIMITS)
    assert messages[0]["reasoning_content"] == "r" and messages[0]["content"] == "a"
    assert [call["function"]["name"] for call in messages[0]["tool_calls"]] == ["f", "g"]
    assert messages[1] == {"role": "assistant", "content": "b"}


def test_log_probabilities_belong_to_content():
    output = OutputItems(LISTS)
    first, second = {"token": "r"}, {"token": "a"}
    output.add([ReasoningText("r")], [first])
    (*_, delta) = output.add([ContentText("a")], [second])
    assert delta["logprobs"] == [second]
    output.end(whole=True)
    assert [item.get("content")[0].get("logprobs") for item in plain(output.done)] == [None, [second]]


def test_a_call_that_a_stop_string_cut_is_incomplete():
    """A client would carry it out."""
    cut: list[Part] = [CallBegin(0, "c0", "f"), CallArguments(0, '{"x":')]
    whole: list[Part] = [CallBegin(0, "c0", "f"), CallArguments(0, "{}"), ContentText("b")]
    for parts, status in ((cut, "incomplete"), (whole, "completed")):
        items = OutputItems(LISTS)
        items.add(parts)
        items.end(whole=True, stopped=True)
        assert [one["status"] for one in items.done] == ["completed"] * (len(items.done) - 1) + [status]
