"""Anthropic's messages become those of a chat; errors name the place."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.frontends.http.anthropic.blocks import WrittenInputs, messages_size, read_messages
from router.text import written_numbers
from router.text.conversation import Conversation
from router.text.tokenizer import INLINE_CHAT_CHARACTERS

LIMITS: Any = SimpleNamespace()
CACHE = {"cache_control": {"type": "ephemeral"}}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def use(call: str, name: str = "ls", **values: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": name, "input": values}


def result(call: str, *content: Any, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": call,
        **({"content": content[0]} if content else {}),
        **more,
    }


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def test_calls_may_have_names_of_1024_characters():
    turn = [user(text("go")), assistant(use("a", "f" * 1024)), user(result("a"))]
    _, message, told = read_messages(turn, None, LIMITS)
    assert told["name"] == message["tool_calls"][0]["function"]["name"] == "f" * 1024
    with pytest.raises(InvalidRequestError) as caught:
        read_messages([user(text("go")), assistant(use("a", "f" * 1025))], None, LIMITS)
    assert caught.value.field == "messages.1.content.0.name"


def test_a_whole_conversation_becomes_messages():
    given = [
        user(text("<reminder>"), text("list files", **CACHE)),
        assistant(
            {"type": "thinking", "thinking": "I need ls.", "signature": "baton"},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            use("a", path="."),
            use("b", "pwd"),
        ),
        user(result("a", [text("x.py"), text("y.py")]), result("b", is_error=True), text("go on")),
        {"role": "user", "content": "now"},
    ]
    assert read_messages(given, [text("You are."), text("Be brief.", **CACHE)], LIMITS) == [
        {"role": "system", "content": "You are.\nBe brief."},
        {"role": "user", "content": "<reminder>\nlist files"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "I need ls.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "ls", "arguments": {"path": "."}}},
                {"id": "b", "type": "function", "function": {"name": "pwd", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "ls", "content": "x.py\ny.py"},
        {"role": "tool", "tool_call_id": "b", "name": "pwd", "content": ""},
        {"role": "user", "content": "go on\nnow"},
    ]


def test_system_as_text_and_as_message():
    given = [{"role": "user", "content": "hi"}, {"role": "system", "content": "later"}]
    assert [one["role"] for one in read_messages(given, "first", LIMITS)] == ["system", "user", "system"]
    assert [one["role"] for one in read_messages(given[:1], [], LIMITS)] == ["user"]


def test_empty_contents_are_accepted_from_every_role():
    contents: list[Any] = ["", []]
    for content in contents:
        assert read_messages([{"role": "user", "content": content}], None, LIMITS) == [
            {"role": "user", "content": ""}
        ]
        assert read_messages([{"role": "assistant", "content": content}], "", LIMITS)
        assert read_messages([{"role": "system", "content": content}], [], LIMITS)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[list[Any], Any, str, type[Exception]]] = [
    ([user(text("a"), IMAGE)], None, "messages.0.content.1.type", UnsupportedFieldError),
    ([user({"type": "document"})], None, "messages.0.content.0.type", UnsupportedFieldError),
    ([user(use("a"))], None, "messages.0.content.0.type", UnsupportedFieldError),
    ([assistant(result("a"))], None, "messages.0.content.0.type", UnsupportedFieldError),
    ([assistant({"type": "server_tool_use"})], None, "messages.0.content.0.type", UnsupportedFieldError),
    ([user({"type": "text", "text": 1})], None, "messages.0.content.0.text", InvalidRequestError),
    ([user({"type": "text"})], None, "messages.0.content.0.text", InvalidRequestError),
    ([user({"text": "a"})], None, "messages.0.content.0.type", InvalidRequestError),
    ([user("a")], None, "messages.0.content.0", InvalidRequestError),
    ([{"role": "user", "content": 1}], None, "messages.0.content", InvalidRequestError),
    ([{"role": "tool", "content": ""}], None, "messages.0.role", InvalidRequestError),
    ([1], None, "messages.0", InvalidRequestError),
    ([user(result("a"))], None, "messages.0.content.0.tool_use_id", InvalidRequestError),
    ([assistant(use("a"))], None, "messages.0.content.0", InvalidRequestError),
    ([assistant(use("a"), use("a"))], None, "messages.0.content.1.id", InvalidRequestError),
    ([assistant({**use("a"), "input": "{}"})], None, "messages.0.content.0.input", InvalidRequestError),
    ([assistant(use("x" * 257))], None, "messages.0.content.0.id", InvalidRequestError),
    (
        [assistant(use("a")), user(result("a", [text("b"), IMAGE]))],
        None,
        "messages.1.content.0.content.1.type",
        UnsupportedFieldError,
    ),
    ([user(text("a"))], [IMAGE], "system.0.type", UnsupportedFieldError),
    ([user(text("a"))], [{"type": "text"}], "system.0.text", InvalidRequestError),
]


@pytest.mark.parametrize(("messages", "system", "field", "kind"), REFUSED)
def test_refusals_name_the_place(messages, system, field, kind):
    with pytest.raises(kind) as refusal:
        read_messages(messages, system, LIMITS)
    assert refusal.value.field == field
    assert field in refusal.value.message


def test_large_conversations_are_known_before_they_are_read():
    large = "x" * INLINE_CHAT_CHARACTERS
    small = messages_size([user(text("a")), {"role": "user", "content": "b"}], "c")
    assert small < INLINE_CHAT_CHARACTERS
    for messages, system in (
        ([user(text(large))], None),
        ([assistant({"type": "thinking", "thinking": large})], None),
        ([user(result("a", large))], None),
        ([user(result("a", [text(large)]))], None),
        ([assistant(use("a", path=large))], None),
        ([assistant(use("a", edits=[{"old": large}]))], None),
        ([user(text("a"))], large),
        ([user(text("a"))], [text(large)]),
    ):
        assert messages_size(messages, system) > INLINE_CHAT_CHARACTERS


@pytest.mark.parametrize("number", ["1.10", "1E5", "-0", "0.1234567890123456789", "12345678901234567890123"])
def test_numbers_of_inputs_stay_as_they_were_written(number):
    calls = [use("a", n=0.5), use("b", n="NUMBER", of=[{"n": "NUMBER"}]), use("c")]
    given = [user(text("1.10")), assistant(text("-0"), *calls), user(*(result(one) for one in "abc"))]
    raw = json.dumps({"model": "m", "messages": given}).replace('"NUMBER"', number).encode()
    messages = orjson.loads(raw)["messages"]
    _, made, *_ = read_messages(messages, None, LIMITS, WrittenInputs(bytearray(raw)))
    arguments = [one["function"]["arguments"] for one in made["tool_calls"]]
    assert written_numbers.dumps(arguments[1]) == f'{{"n": {number}, "of": [{{"n": {number}}}]}}'
    assert arguments[0] == {"n": 0.5} and arguments[2] == {} and Conversation([made]).has_written_numbers
    _, plain, *_ = read_messages(messages, None, LIMITS)
    assert plain["tool_calls"][1]["function"]["arguments"] == messages[1]["content"][2]["input"]


def test_a_body_without_such_numbers_is_parsed_once(monkeypatch):
    given = [assistant(use("a", n=10)), user(result("a", "1.10"))]
    inputs = WrittenInputs(orjson.dumps({"messages": given}))
    monkeypatch.setattr(written_numbers, "loads", None)
    assert read_messages(given, None, LIMITS, inputs)[0]["tool_calls"][0]["function"]["arguments"]["n"] == 10


def test_a_body_is_searched_for_minus_zero_once_however_many_inputs_have_a_zero(monkeypatch):
    """4,000 inputs of one body took 80 s."""
    searched, search = [], written_numbers.may_have_minus_zero

    def counted(raw: bytes) -> bool:
        searched.append(raw)
        return search(raw)

    monkeypatch.setattr(written_numbers, "may_have_minus_zero", counted)
    given = [assistant(*(use(str(i), n=0) for i in range(50))), user(*(result(str(i)) for i in range(50)))]
    text = orjson.dumps({"messages": given})
    read_messages(given, None, LIMITS, WrittenInputs(text))
    assert searched == [text]


def test_calls_of_namespaces_come_back():
    """Models also call tools such as `browser.search`, and answers show them."""
    (_, called, _) = read_messages(
        [user(text("go")), assistant(use("a", "browser.search", q=1)), user(result("a", "x"))], None, LIMITS
    )
    assert called["tool_calls"][0]["function"]["name"] == "browser.search"
    with pytest.raises(InvalidRequestError, match="printable characters"):
        read_messages([assistant(use("a", "")), user(result("a"))], None, LIMITS)


def test_empty_texts_before_others_leave_no_line_ends():
    """Agents begin turns with them; between others they are empty lines."""
    made = read_messages(
        [user(text(""), text("a"), text(""), text("b")), assistant(text(""), text("c"))],
        [text(""), text("s")],
        LIMITS,
    )
    assert [one["content"] for one in made] == ["s", "a\n\nb", "c"]


def test_a_call_without_a_result_at_the_end_is_named():
    """The first one of the last turn: earlier ones have theirs."""
    turn = [user(text("go")), assistant(use("a"), use("b")), user(result("a"), result("b"))]
    last = assistant(text("well"), use("c"), use("d"))
    with pytest.raises(InvalidRequestError, match="a tool_result must follow this tool_use") as caught:
        read_messages([*turn, last], None, LIMITS)
    assert caught.value.field == "messages.3.content.1"
    with pytest.raises(InvalidRequestError) as caught:
        read_messages([*turn, last, user(result("c")), assistant(use("e"))], None, LIMITS)
    assert caught.value.field == "messages.3.content.2"
    assert len(read_messages([*turn, last, user(text("never mind"))], None, LIMITS)) == 6
