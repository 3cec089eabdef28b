"""The unmodified `openai` package's Chat Completions with tools, and its Responses, on a whole cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.end_to_end.conftest import run_cluster

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
FLAGS = ("--pool", "process", "--dtype", "float32", "--local-prefill", "fallback", "--kv-memory", "64MiB")
TOOLS = ("--tool-parser", "hermes")  # the demo model's template has no tools
HELLO = "Once upon a time"


class Colour(BaseModel):
    name: Literal["red", "green"]
    shade: Literal[1, 2, 3]


class Paint(BaseModel):
    """Paints a wall"""

    colour: Colour


class Song(BaseModel):
    verses: Literal[1, 2]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        run_cluster(tmp_path_factory.mktemp("openai"), MODEL, *FLAGS, *TOOLS) as cluster,
        openai.OpenAI(base_url=f"{cluster.http}/v1", api_key="-", max_retries=0, timeout=60) as made,
    ):
        yield made


PAINT: Any = openai.pydantic_function_tool(Paint)
SING: Any = openai.pydantic_function_tool(Song, name="sing")
NAMED: Any = {"type": "function", "function": {"name": "Paint"}}
CHAT: Any = {
    "model": "",
    "messages": [{"role": "user", "content": "Paint it"}],
    "temperature": 0,
    "max_completion_tokens": 96,
    "parallel_tool_calls": False,
}


@pytest.mark.system
@pytest.mark.parametrize(
    ("choice", "reason"), [("required", "tool_calls"), (NAMED, "stop")], ids=["required", "named"]
)
def test_a_call_that_must_be_made_is_parsed_and_streamed_alike(
    client: openai.OpenAI, choice: Any, reason: str
) -> None:
    ask = {**CHAT, "tools": [SING, PAINT], "tool_choice": choice}
    parsed = client.chat.completions.parse(**ask).choices[0]
    assert parsed.finish_reason == reason and parsed.message.tool_calls
    (call,) = parsed.message.tool_calls
    assert isinstance(call.function.parsed_arguments, (Paint, Song) if choice == "required" else Paint)
    chunks = list(client.chat.completions.create(**ask, stream=True))
    deltas = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or ()]
    first, *more = deltas
    assert first.id and first.function and first.function.name == call.function.name
    # Later deltas bring the same call's arguments, in pieces
    assert len(more) > 1
    assert all(one.index == 0 and one.id is None for one in more)
    arguments = "".join(one.function.arguments or "" for one in deltas if one.function)
    assert arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == reason


@pytest.mark.system
def test_the_packages_own_stream_ends_with_parsed_arguments(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT, tools=[PAINT], tool_choice=NAMED) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    deltas = [one for one in events if one.type == "tool_calls.function.arguments.delta"]
    (done,) = [one for one in events if one.type == "tool_calls.function.arguments.done"]
    assert isinstance(done.parsed_arguments, Paint)
    assert "".join(one.arguments_delta for one in deltas) == done.arguments
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments == done.arguments


@pytest.mark.system
def test_a_chat_s_answer_is_a_pydantic_model(client: openai.OpenAI) -> None:
    ask = {**CHAT, "response_format": Colour}
    del ask["parallel_tool_calls"]  # allowed beside tools alone
    (choice,) = client.chat.completions.parse(**ask).choices
    assert isinstance(choice.message.parsed, Colour)
    with client.chat.completions.stream(**ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


@pytest.mark.system
def test_the_model_may_choose_and_reads_what_a_call_gave(client: openai.OpenAI) -> None:
    ask = {**CHAT, "tools": [PAINT], "max_completion_tokens": 12}
    free = client.chat.completions.create(**ask, tool_choice="auto")
    (choice,) = free.choices
    assert choice.message.content or choice.message.tool_calls
    chunks = list(client.chat.completions.create(**ask, tool_choice="auto", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    called = client.chat.completions.create(**{**ask, "max_completion_tokens": 96}, tool_choice="required")
    message = called.choices[0].message
    assert message.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in message.tool_calls]
    turns: Any = [*CHAT["messages"], message, *results]
    after = client.chat.completions.create(**{**ask, "messages": turns}, tool_choice="none")
    assert after.choices[0].message.content and not after.choices[0].message.tool_calls
    assert after.usage and called.usage and after.usage.prompt_tokens > called.usage.prompt_tokens


@pytest.mark.system
def test_create_and_stream_answer_alike(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    ask: Any = {"model": model.id, "input": HELLO, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**ask, instructions="Tell a story")
    assert whole.status in ("completed", "incomplete") and whole.output_text
    assert whole.usage is not None and whole.usage.output_tokens <= 24
    counted = client.responses.input_tokens.count(model=model.id, input=HELLO, instructions="Tell a story")
    assert counted.input_tokens == whole.usage.input_tokens
    deltas = []
    with client.responses.stream(**ask, instructions="Tell a story") as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
    assert "".join(deltas) == whole.output_text
    assert event.type in ("response.completed", "response.incomplete")
    assert event.response.usage is not None
    assert event.response.usage.output_tokens == whole.usage.output_tokens
    # Its items are the next request's input
    question: Any = {"role": "user", "content": "Go on"}
    items: Any = [{"role": "user", "content": HELLO}, *whole.output, question]
    after = client.responses.create(**{**ask, "input": items})
    assert after.usage is not None and after.usage.input_tokens > whole.usage.input_tokens


@pytest.mark.system
def test_parse_returns_a_pydantic_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.responses.parse(
            model="", input="A colour?", text_format=Colour, extra_body={"seed": seed}
        )
        assert answer.status == "completed" and isinstance(answer.output_parsed, Colour)
        with client.responses.stream(model="", input="A colour?", text_format=Colour) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Colour)


@pytest.mark.system
def test_a_call_and_its_result_are_input(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **openai.pydantic_function_tool(Paint)["function"]}]
    items: Any = [
        {"role": "user", "content": "Paint it"},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "A colour is needed"}],
        },
        {
            "type": "function_call",
            "call_id": "c",
            "name": "Paint",
            "arguments": json.dumps({"colour": {"name": "red", "shade": 1}}),
        },
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    answer = client.responses.create(
        model="",
        input=items,
        tools=tools,
        tool_choice="none",
        max_output_tokens=4,
    )
    assert answer.usage is not None and 0 < answer.usage.output_tokens <= 4
    assert answer.tools[0].to_dict()["name"] == "Paint"


@pytest.mark.system
def test_what_is_refused_names_its_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="a", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="", input="a", tools=[{"type": "web_search"}])
    assert caught.value.param == "tools[0].type"
