"""Tools and reasoning as the openai package sends and reads them; a stub parser reads what a stub model wrote."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai
import pytest

from router.text.tokenizer import ModelText
from tests.router.frontends.golden.stub_gateway import DEMO, served
from tests.router.frontends.http.tool_stubs import Formats, Gateway

CALL = '{"x":1}'
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "<|im_end|>",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
]


@pytest.fixture(scope="module")
def text():
    made = ModelText(DEMO)
    yield made
    made.close()


@pytest.fixture
async def gateway(text):
    made = Gateway(text, {}, Formats())
    yield made
    made.first.grammars.close()


@contextlib.asynccontextmanager
async def connected(gateway):
    async with (
        served(gateway) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client.chat.completions


async def test_a_call_and_its_result(gateway):
    async with connected(gateway) as chat:
        answer = await chat.create(**ASK, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.id, call.function.name, call.function.arguments) == ("call_1", "f", CALL)
        assert choice.message.content == " soLet me see."
        assert choice.message.model_extra["reasoning_content"] == "hmm"
        assert answer.usage.completion_tokens_details.reasoning_tokens == 1
        history = [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>"}]
        await chat.create(**{**ASK, "messages": [*ASK["messages"], *history]}, tools=TOOLS)
    special = gateway.first.text.tokenizer.token_to_id("<|im_end|>")
    first, second = gateway.accepted
    assert first.grammar is None
    assert second.prompt_tokens.count(special) <= 3, "the result's text is no end of a turn"


async def test_a_streamed_call_adds_up(gateway):
    async with connected(gateway) as chat:
        async with chat.stream(**ASK, tools=TOOLS) as stream:
            final = await stream.get_final_completion()
        chunks = [one async for one in await chat.create(**ASK, tools=TOOLS, stream=True)]
    (choice,) = final.choices
    assert choice.message.tool_calls[0].function.arguments == CALL
    assert choice.finish_reason == "tool_calls"
    pieces = [one.choices[0].delta.tool_calls[0] for one in chunks if one.choices[0].delta.tool_calls]
    assert [(one.index, one.id, one.function.name, one.function.arguments) for one in pieces] == [
        (0, "call_1", "f", ""),
        (0, None, None, '{"x":'),
        (0, None, None, "1}"),
    ]


async def test_demanded_calls_have_a_grammar(gateway):
    named: Any = {"type": "function", "function": {"name": "f"}}
    async with connected(gateway) as chat:
        assert (await chat.create(**ASK, tools=TOOLS, tool_choice="required")).choices[
            0
        ].finish_reason == "tool_calls"
        assert (await chat.create(**ASK, tools=TOOLS, tool_choice=named)).choices[0].finish_reason == "stop"
        wanted: Any = {"type": "json_object"}
        await chat.create(**ASK, tools=TOOLS, tool_choice=named, response_format=wanted)
        await chat.create(**ASK, tools=TOOLS, response_format=wanted)
    assert [one.grammar.lark for one in gateway.accepted] == ['start: "f"'] * 3 + ['start: "f" | "{}"']


async def test_an_impossible_schema_names_the_tool_if_it_is_strict(gateway):
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}
    loose: Any = [{"type": "function", "function": function}]
    strict: Any = [{"type": "function", "function": {**function, "strict": True}}]
    async with connected(gateway) as chat:
        for choice in ("required", "auto"):
            with pytest.raises(openai.BadRequestError, match="/properties/x/not") as caught:
                await chat.create(**ASK, tools=strict, tool_choice=choice)
            assert caught.value.param == "tools[0].function.parameters"
            await chat.create(**ASK, tools=loose, tool_choice=choice)


async def test_choices_are_parsed_one_by_one(gateway):
    async with connected(gateway) as chat:
        answers = await asyncio.gather(*(chat.create(**ASK, tools=TOOLS) for _ in range(3)))
    assert [one.choices[0].message.tool_calls[0].function.arguments for one in answers] == [CALL] * 3
