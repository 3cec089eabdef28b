"""Items of an input become the messages of one chat, and errors name their place."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.frontends.field_names import renamed
from router.frontends.http.responses.endpoint import _NAMES, _PARTS
from router.frontends.http.responses.input_items import encrypted, items_size, read_items
from router.frontends.http.responses.tools import read_choice, read_tools
from router.frontends.http.responses.truncation import Turns
from router.request.limits import FieldLimits
from router.text.conversation import Conversation, Tool

LIMITS = FieldLimits(RouterConfig(model=Path("/models/m"), max_tools=2), "m", 64, 512)
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "12"}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def reasoning(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **more}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [user("hi")]),
        ([user("hi")], [user("hi")]),
        ([{"type": "message", **user("hi"), "status": "completed"}], [user("hi")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [user("ab")],
        ),
        ([{"role": "developer", "content": "d"}], [{"role": "system", "content": "d"}]),
        (
            [
                {
                    "role": "assistant",
                    "id": "m",
                    "content": [{"type": "output_text", "text": "a", "annotations": []}],
                }
            ],
            [assistant("a")],
        ),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], [assistant("no")]),
        # An output ends the turn: what is called by it is another one
        (
            [user("hi"), CALL, OUTPUT, {**CALL, "call_id": "c2"}, {**OUTPUT, "call_id": "c2"}],
            [
                user("hi"),
                assistant("", tool_calls=[CHAT_CALL]),
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "12"},
                assistant("", tool_calls=[{**CHAT_CALL, "id": "c2"}]),
                {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "12"},
            ],
        ),
        # One turn of the assistant is one message
        (
            [reasoning("r"), {"role": "assistant", "content": "a"}, CALL, {**CALL, "call_id": "c2"}, OUTPUT],
            [
                assistant("a", reasoning_content="r", tool_calls=[CHAT_CALL, {**CHAT_CALL, "id": "c2"}]),
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "12"},
            ],
        ),
        ([reasoning("r"), CALL], [assistant("", reasoning_content="r", tool_calls=[CHAT_CALL])]),
        # What comes behind a call begins another message
        ([CALL, assistant("a")], [assistant("", tool_calls=[CHAT_CALL]), assistant("a")]),
        ([assistant("a"), reasoning("r")], [assistant("a"), assistant("", reasoning_content="r")]),
        ([assistant("a"), assistant("b")], [assistant("a"), assistant("b")]),
        (
            [CALL, {**OUTPUT, "output": [{"type": "input_text", "text": "1"}]}],
            [
                assistant("", tool_calls=[CHAT_CALL]),
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "1"},
            ],
        ),
        # Reasoning without its text is left out
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, user("u")], [user("u")]),
        (
            [{"type": "reasoning", "summary": [], "encrypted_content": encrypted("r")}],
            [assistant("", reasoning_content="r")],
        ),
        ([reasoning("r", encrypted_content="foreign")], [assistant("", reasoning_content="r")]),
    ],
)
def test_items_become_messages(given, messages):
    assert read_items(given, None, LIMITS) == messages


def test_instructions_come_first():
    assert read_items("hi", "be brief", LIMITS) == [{"role": "system", "content": "be brief"}, user("hi")]


@pytest.mark.parametrize(
    ("items", "field"),
    [
        ([1], "input[0]"),
        ([user("a"), {}], "input[1].role"),
        ([{"type": "message", "content": "a"}], "input[0].role"),
        ([{"role": "tool", "content": "a"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": None}], "input[0].content"),
        ([{"role": "user", "content": [1]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "input[0].content[0].type"),
        ([{"type": "function_call", "call_id": "c", "arguments": "{}"}], "input[0].name"),
        ([CALL, CALL], "input[1].call_id"),
        ([CALL | {"arguments": "[" * 100}], "input[0].arguments"),
        ([CALL | {"name": "two\nlines"}], "input[0].name"),
        ([OUTPUT], "input[0].call_id"),
        ([CALL, {**OUTPUT, "output": 1}], "input[1].output"),
        ([{"type": "reasoning", "content": [{"type": "reasoning_text"}]}], "input[0].content[0].text"),
        ([{"type": "reasoning", "content": [[None]]}], "input[0].content[0]"),
        ([{"type": "reasoning", "encrypted_content": "Zm9yZWlnbg=="}], "input[0].encrypted_content"),
    ],
)
def test_errors_name_the_place(items, field):
    with pytest.raises(InvalidRequestError) as caught:
        read_items(items, None, LIMITS)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("items", "field", "named"),
    [
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type", "input_image"),
        ([{"type": "web_search_call", "id": "w"}], "input[0].type", "web_search_call"),
        ([{"type": "item_reference", "id": "w"}], "input[0].type", "item_reference"),
    ],
)
def test_what_is_not_supported_is_named(items, field, named):
    with pytest.raises(UnsupportedFieldError) as caught:
        read_items(items, None, LIMITS)
    assert caught.value.field == field
    assert named in caught.value.message


def test_size_counts_texts_and_stops_at_the_limit():
    assert items_size("a" * 1000, None) > 1000
    assert items_size([user("a" * 1000)], "b" * 500) > 1500
    assert items_size([{"role": "user", "content": [{"type": "input_text", "text": "a" * 900}]}], None) > 900
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "a" * 900}]}
    assert items_size([refusal], None) > 900
    assert items_size([CALL | {"arguments": "x" * 700}], None) > 700
    many = items_size([user("a" * 10_000)] * 1000, None)
    assert many < 10_000 * 1000
    assert items_size([None, 1, {"content": [1, {"text": 2}]}], None) > 0


def test_the_oldest_turns_are_left_out():
    turns = [user("x" * 100), assistant("y" * 100, reasoning_content="z" * 900)] * 4
    system = {"role": "system", "content": "s"}
    given = Turns(Conversation([system, *turns]))
    lengths = [20, 100, 100, 100, 100]
    shorter = given.without_oldest(lengths, tokens=420, room=220)
    assert shorter is not None and shorter.conversation().messages == [system, *turns[6:]]
    assert len(given) == 5 and len(shorter) == 2
    assert shorter.without_oldest(lengths[:2], tokens=420, room=200) is None, "the last turn is kept"
    # It always gets shorter
    left = given.without_oldest(lengths, tokens=420, room=419)
    assert left is not None and len(left) == 4


@pytest.mark.parametrize(
    ("lengths", "room", "dropped"),
    [
        ([20, 10, 300, 30, 40, 50], 160, 2),  # 140 of 152 are left; the turns are as long as they are
        ([20, 300, 10, 30, 40, 50], 160, 1),  # 150
        ([300, 20, 10, 30, 40, 50], 160, 4),  # what precedes them stays, and the last one
        ([90, 210, 50, 50], 200, 1),  # 190: exactly 95 % of the room
        ([91, 209, 50, 50], 200, 2),
    ],
)
def test_the_oldest_turns_are_left_out_by_their_own_lengths(lengths, room, dropped):
    turns = [[user(f"u{i}"), assistant(f"a{i}")] for i in range(len(lengths) - 1)]
    system = {"role": "system", "content": "s"}
    given = Turns(Conversation([system, *itertools.chain(*turns)]))
    shorter = given.without_oldest(lengths, tokens=sum(lengths), room=room)
    assert shorter is not None
    assert shorter.conversation().messages == [system, *itertools.chain(*turns[dropped:])]


def test_leaving_out_turns_looks_at_no_message():
    """It runs on the event loop, and an input has thousands of messages."""
    given = Turns(Conversation([user("u"), user("v"), *[assistant("a")] * 200_000]))

    def seconds() -> float:
        began = time.process_time()
        assert given.without_oldest([0, 1, 200_001], tokens=200_002, room=100) is not None
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.001  # 10 ms where they are copied


def test_turns_are_measured_as_templates_show_them():
    """Tools are always there, and reasoning in the last turn only."""
    messages = [user("a"), assistant("b", reasoning_content="early"), user("c"), assistant("d")]
    messages[-1]["reasoning_content"] = "late"
    first, earlier, last = Turns(Conversation(messages, [Tool("look", "up")])).texts()
    assert "look" in first and "early" not in earlier and "late" in last


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
    {"type": "function", "name": "g"},
]


def test_tools_are_read_and_a_choice_narrows_them():
    tools = read_tools(TOOLS, LIMITS)
    assert tools == [Tool("f", "d", {"type": "object"}, True), Tool("g")]
    assert read_choice(None, tools) == (tools, "auto", "")
    assert read_choice("none", tools) == (tools, "none", "")
    assert read_choice({"type": "function", "name": "g"}, tools) == (tools, "auto", "g")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    assert read_choice(allowed, tools) == ([tools[1]], "required", "")


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"type": "function", "name": "h"}, "tool_choice.name"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
            "tool_choice.tools[0].name",
        ),
    ],
)
def test_a_choice_names_one_of_the_tools(choice, field):
    with pytest.raises(InvalidRequestError) as caught:
        read_choice(choice, read_tools(TOOLS, LIMITS))
    assert caught.value.field == field
    with pytest.raises(InvalidRequestError):
        read_choice("required", [])


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([{"type": "function"}], "tools[0].name"),
        ([{"type": "function", "name": "f", "parameters": []}], "tools[0].parameters"),
        ([TOOLS[0], {**TOOLS[1], "description": 1}], "tools[1].description"),
        ([TOOLS[0], TOOLS[0]], "tools"),
        (TOOLS * 2, "tools"),
    ],
)
def test_errors_name_the_tool(tools, field):
    with pytest.raises(InvalidRequestError) as caught:
        read_tools(tools, LIMITS)
    assert caught.value.field == field


def test_a_long_summary_is_not_copied() -> None:
    item = {"type": "reasoning", "summary": [0] * 1_000_000}

    def seconds() -> float:
        began = time.process_time()
        assert read_items([item], None, LIMITS) == []
        return time.process_time() - began

    assert min(seconds() for _ in range(3)) < 0.002  # a copy takes 5 ms
    with pytest.raises(InvalidRequestError, match=r"input\[0\]\.summary: must be a list"):
        read_items([{"type": "reasoning", "summary": {}}], None, LIMITS)


def test_an_error_of_a_chats_message_names_the_input():
    """Its number is that of the chat's message: several items make one, and the instructions another."""
    message = "messages[2].tool_calls[0].function.arguments.a: holds the text of a special token"
    with pytest.raises(InvalidRequestError) as caught, renamed(_NAMES, _PARTS):
        raise InvalidRequestError(message, field=message.partition(":")[0])
    assert caught.value.field == "input"
    assert caught.value.message == "input: holds the text of a special token"


def test_reasoning_behind_reasoning_is_another_message():
    """The second one would take the first one's place."""
    given = [user("hi"), reasoning("one"), reasoning("two"), assistant("so")]
    expected = [
        user("hi"),
        assistant("", reasoning_content="one"),
        assistant("so", reasoning_content="two"),
    ]
    assert read_items(given, None, LIMITS) == expected


def test_a_turn_is_left_out_also_where_no_turn_has_a_text():
    """Their template alone may exceed the context, and each rendering costs a request."""
    turns = Turns(Conversation([user(""), user(""), user("")]))
    shorter = turns.without_oldest([0, 0, 0, 0], 100, 50)
    assert shorter is not None and len(shorter) == len(turns) - 1
