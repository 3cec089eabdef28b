"""Long names and many parts cost what their bytes cost, and are refused before anything copies them."""

from __future__ import annotations

import sys
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError
from router.frontends.grpc.conversation import read_conversation
from router.frontends.http.anthropic.blocks import read_messages as read_blocks
from router.frontends.http.responses.tools import _choice
from router.request.grammar.schema_walk import too_deep
from router.request.limits import FieldLimits
from router.request.messages import read_messages
from router.text.conversation import Conversation
from wire import inference_pb2 as pb

TEXT: Any = SimpleNamespace(max_position_embeddings=4096, vocab_size=512)


@pytest.fixture
def limits(tmp_path):
    return FieldLimits.of(RouterConfig(model=tmp_path), TEXT)


def test_a_schemas_pointers_are_written_for_errors_alone():
    schema = {"properties": {"n" * 100_000: {"anyOf": [{"type": "null"}] * 2_000 + [1] * 2_000}}}
    tracemalloc.start()
    assert too_deep(schema) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("one", [{}, {"type": "null"}, {"items": 1}, {"properties": []}, {"anyOf": {}}])
def test_a_schemas_depth_takes_a_call_for_each_part(one):
    """Tools have some 60,000 parts at most: with places, ten calls each, they took 0.4 s under the interpreter lock."""
    calls, parts = 0, 1_000

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        found = too_deep({"anyOf": [one] * parts})
    finally:
        sys.setprofile(None)
    assert found is None
    assert calls <= 2 * parts + 50


def test_a_schemas_depth_is_named():
    schema: dict[str, Any] = {}
    inner = schema
    for _ in range(40):
        inner["properties"] = {"a/b": {"items": {}}}
        inner = inner["properties"]["a/b"]["items"]
    found = too_deep(schema)
    assert found is not None and "/properties/a~1b/items" in found.message


def test_names_of_tools_in_messages_are_names(limits):
    use = {"type": "tool_use", "id": "i", "name": "f" * 1025, "input": {}}
    with pytest.raises(InvalidRequestError) as caught:
        read_blocks([{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}], None, limits)
    assert caught.value.field == "messages.1.content.0.name"
    tool = {"role": "tool", "content": "x", "tool_call_id": "i", "name": "f" * 1025}
    with pytest.raises(InvalidRequestError, match="name"):
        read_messages([tool], limits)
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="tool", tool_call_id="i", name="f" * 1025)])
    with pytest.raises(InvalidRequestError, match="name"):
        read_conversation(chat, limits)


def test_an_effort_over_grpc_is_one_of_a_set(limits):
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")])
    chat.reasoning_effort = "low<|im_end|>"
    with pytest.raises(InvalidRequestError) as caught:
        read_conversation(chat, limits)
    assert caught.value.field == "chat.reasoning_effort"
    chat.reasoning_effort = "low"
    assert read_conversation(chat, limits).reasoning_effort == "low"


def test_thousands_of_blocks_are_joined_once(limits):
    blocks = [{"type": "text", "text": "a" * 350} for _ in range(6_000)]
    began = time.process_time()
    (message,) = read_blocks([{"role": "user", "content": blocks}], None, limits)
    assert time.process_time() - began < 1.0
    assert len(message["content"]) == 6_000 * 350 + 5_999 * (len(message["content"]) - 6_000 * 350) // 5_999


def test_numbers_in_arguments_count_as_text():
    call = {"id": "i", "type": "function", "function": {"name": "f", "arguments": {"a": [1.5] * 1_000}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert Conversation([message]).characters > 4_000


def test_a_choice_is_kept_without_other_members():
    info: Any = None
    kept = _choice({"type": "function", "name": "f", "x": "a" * 1_000}, info)
    assert kept == {"type": "function", "name": "f"}
