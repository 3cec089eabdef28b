"""The unmodified `anthropic` package reads answers with thinking, text and calls, whole and streamed, and failures."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cluster.errors import EngineRequestError, OverloadedError, UnavailableError
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.text import written_numbers
from tests.router.frontends.http.anthropic.record import WEATHER

anthropic = pytest.importorskip("anthropic")
CALL: list[Part] = [
    ReasoningText("They ask "),
    ReasoningText("for Bern."),
    ContentText("I look "),
    ContentText("it up."),
    CallBegin(0, "call_1", "get_weather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, '"Bern"}'),
]
ASK: Any = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Bern?"}]}


@pytest.fixture(scope="module")
def client(scripted):
    with anthropic.Anthropic(base_url=scripted.url.removesuffix("/v1"), api_key="-", max_retries=0) as made:
        yield made


def test_a_whole_answer_with_a_call_and_the_next_turn(scripted, client):
    scripted.script(CALL, "tool_calls")
    answer = client.messages.create(**ASK, tools=[WEATHER])
    thinking, text, call = answer.content
    assert (thinking.thinking, text.text) == ("They ask for Bern.", "I look it up.")
    assert (call.type, call.id, call.name, call.input) == (
        "tool_use",
        "call_1",
        "get_weather",
        {"city": "Bern"},
    )
    assert answer.stop_reason == "tool_use" and answer.id.startswith("msg_")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 4, 9)
    assert usage.output_tokens_details.thinking_tokens == 2
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    client.messages.create(**{**ASK, "messages": [*ASK["messages"], *turns]}, tools=[WEATHER])
    prompt = scripted.first.text.tokenizer.decode(scripted.accepted[1].prompt_tokens)
    assert "12 degrees" in prompt and "I look it up." in prompt


def test_the_tool_runner_goes_on_without_a_thread(scripted, client):
    """It asks the server to store the conversation, and is told that none is stored."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city

        Args:
            city: its name
        """
        return f"12 degrees in {city}"

    scripted.script(CALL, "tool_calls")
    runner = client.beta.messages.tool_runner(**ASK, tools=[get_weather], max_iterations=2)
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    first, second = scripted.accepted
    assert "12 degrees in Bern" in scripted.first.text.tokenizer.decode(second.prompt_tokens)
    assert list(second.prompt_tokens[:8]) == list(first.prompt_tokens[:8])
    with pytest.raises(anthropic.BadRequestError, match="thread: no conversation is stored here"):
        client.beta.messages.create(**ASK, thread={"type": "create"})


def test_a_streamed_answer_is_the_whole_one(scripted, client):
    scripted.script(CALL, "tool_calls")
    whole = client.messages.create(**ASK, tools=[WEATHER])
    with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
        events, streamed = list(stream), stream.get_final_message()
    assert [one.to_dict() for one in streamed.content] == [one.to_dict() for one in whole.content]
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.input_tokens == 3 and streamed.usage.cache_read_input_tokens == 4
    assert streamed.usage.output_tokens_details.thinking_tokens == 2
    assert events[-1].type == "message_stop"


def test_a_prompt_is_cached_without_an_answer(scripted, client):
    """Workers draw a token, which no answer has."""
    ask = {**ASK, "max_tokens": 0, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    scripted.script([ContentText("x")], "length")
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")
    for completion in scripted.accepted:
        assert completion.prompt_only and completion.sampling.max_tokens == 1
        assert completion.grammar is None and completion.answer_format is None
    with pytest.raises(anthropic.BadRequestError, match="min_tokens"):
        client.messages.create(**ask, extra_body={"min_tokens": 1})


def test_reasons_of_the_end(scripted, client):
    for finish, stop_string, reason in (
        ("stop", None, "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ):
        scripted.script([ContentText("a")], finish, stop_string=stop_string)
        answer = client.messages.create(**ASK)
        assert (answer.stop_reason, answer.stop_sequence) == (reason, stop_string)
        with client.messages.stream(**ASK) as stream:
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == (reason, stop_string)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_their_classes(stream, scripted, client):
    for error, status, kind in (
        (OverloadedError("full", retry_after_seconds=1.5), 429, "rate_limit_error"),
        (UnavailableError("no worker"), 529, "overloaded_error"),
        (EngineRequestError("the engine failed"), 500, "api_error"),
    ):
        scripted.script([], error=error)
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**ASK, stream=stream)
        assert caught.value.status_code == status
        assert caught.value.body["error"] == {"type": kind, "message": error.message}
        assert caught.value.body["request_id"] == caught.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**ASK, tools=[{"type": "web_search_20250305", "name": "web_search"}])


def test_an_error_within_a_stream(scripted, client):
    scripted.script(CALL[:4], error=EngineRequestError("the engine failed"))
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(client.messages.create(**ASK, stream=True))
    assert caught.value.body["error"] == {"type": "api_error", "message": "the engine failed"}


def test_count_tokens_answers_a_number(scripted, client):
    assert client.messages.count_tokens(model="tiny", messages=ASK["messages"]).input_tokens > 1


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens"])
def test_numbers_of_an_input_reach_the_template_as_they_were_written(path, scripted, monkeypatch):
    used = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Bern", "days": 0}}
    answered = {"type": "tool_result", "tool_use_id": "a", "content": "12 degrees"}
    turns = [{"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
    body = {**ASK, "messages": [*ASK["messages"], *turns]}
    if path != "messages":
        del body["max_tokens"]
    rendered, chat = list[str](), scripted.first.text.chat

    async def seen(*given: Any, **more: Any) -> Any:
        made = await chat(*given, **more)
        rendered.append(written_numbers.dumps(made[0].messages))
        return made

    monkeypatch.setattr(scripted.first.text, "chat", seen)
    scripted.script(CALL, "tool_calls")
    raw = json.dumps(body).replace('"days": 0', '"days": 2.50').encode()
    sent = Request(f"{scripted.url}/{path}", raw, {"content-type": "application/json"})
    with urlopen(sent, timeout=60) as answer:
        assert answer.status == 200
    assert '"days": 2.50' in rendered[0]
