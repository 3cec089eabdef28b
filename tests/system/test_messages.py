"""The unmodified `anthropic` package's Messages on a whole cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.end_to_end.conftest import run_cluster
from tests.router.frontends.http.anthropic.record import WEATHER

anthropic = pytest.importorskip("anthropic")
MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
TOOLS = ("--tool-parser", "hermes")  # the demo model's template has no tools
ASK: Any = {
    "model": "",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Once upon a time"}],
    "extra_body": {"temperature": 0},
}

CITIES = {"type": "object", "properties": {"city": {"enum": ["Bern", "Oslo"]}}, "required": ["city"]}
# A small model ends no free text by itself
TOOL = {**WEATHER, "input_schema": {**CITIES, "additionalProperties": False}, "strict": True}
CALLING: Any = {**ASK, "max_tokens": 200, "tools": [TOOL]}
ONE_CALL: Any = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with (
        run_cluster(tmp_path_factory.mktemp("messages"), MODEL, *FLAGS, *TOOLS) as cluster,
        anthropic.Anthropic(base_url=cluster.http, api_key="-", max_retries=0, timeout=60) as made,
    ):
        yield made


@pytest.mark.system
def test_create_and_stream_answer_alike(client: Any) -> None:
    whole = client.messages.create(**ASK, system="Tell a story")
    (block,) = whole.content
    assert whole.stop_reason in ("max_tokens", "end_turn") and block.text
    counted = client.messages.count_tokens(model="", messages=ASK["messages"], system="Tell a story")
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    with client.messages.stream(**ASK, system="Tell a story") as stream:
        texts, last = list(stream.text_stream), stream.get_final_message()
    assert "".join(texts) == block.text and last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == usage.output_tokens
    # The text from its middle on is a stop sequence
    found = block.text[len(block.text) // 2 :][:3]
    stopped = client.messages.create(**ASK, system="Tell a story", stop_sequences=[found, "never written"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", found)


@pytest.mark.system
def test_a_round_trip_with_a_tool(client: Any) -> None:
    answer = client.messages.create(**CALLING, tool_choice=ONE_CALL)
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and calls
    for call in calls:
        assert call.name == "get_weather" and call.input["city"] in ("Bern", "Oslo")
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"} for call in calls]
    messages = [*ASK["messages"], {"role": "assistant", "content": answer.content}]
    messages.append({"role": "user", "content": results})
    after = client.messages.create(**{**CALLING, "messages": messages, "tool_choice": {"type": "none"}})
    assert after.stop_reason in ("end_turn", "max_tokens")
    assert after.usage.input_tokens + after.usage.cache_read_input_tokens > answer.usage.input_tokens


@pytest.mark.system
def test_a_streamed_call_is_the_whole_one(client: Any) -> None:
    whole = client.messages.create(**CALLING, tool_choice=ONE_CALL)
    with client.messages.stream(**CALLING, tool_choice=ONE_CALL) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        last = stream.get_final_message()
    (call,), (streamed,) = (
        [block for block in one.content if block.type == "tool_use"] for one in (whole, last)
    )
    assert (streamed.name, streamed.input) == (call.name, call.input) and last.stop_reason == "tool_use"
    assert json.loads("".join(pieces)) == call.input and len(pieces) > 1


@pytest.mark.system
def test_the_tool_runner_calls_and_answers(client: Any) -> None:
    called = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Bern", "Oslo"]) -> str:
        """The weather of a city"""
        called.append(city)
        return "12 degrees"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    ask = {**ASK, "max_tokens": 200, "tools": [get_weather], "tool_choice": choice}
    runner = client.beta.messages.tool_runner(**ask, max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    assert len(called) == 2 and {*called} <= {"Bern", "Oslo"}


@pytest.mark.system
def test_errors_have_their_classes(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert "tools.0.type" in caught.value.message and caught.value.request_id
