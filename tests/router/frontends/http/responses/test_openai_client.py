"""The unmodified `openai` package reads answers with reasoning, text and calls, whole and streamed, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from cluster.errors import EngineRequestError, GrammarDeadEndError, UnavailableError
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from tests.router.frontends.http.responses.conftest import ScriptedGateway
from tests.router.frontends.http.responses.record import WEATHER, GetWeather, Person

CALL: list[Part] = [
    ReasoningText("They ask "),
    ReasoningText("for Bern."),
    ContentText("I look "),
    ContentText("it up."),
    CallBegin(0, "call_1", "GetWeather"),
    CallArguments(0, '{"city":'),
    CallArguments(0, '"Bern"}'),
]
PERSON: list[Part] = [ContentText('{"name":"Ada",'), ContentText('"age":36}')]


@pytest.fixture(scope="module")
def client(scripted: ScriptedGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=scripted.url, api_key="-", max_retries=0) as made:
        yield made


def test_a_whole_answer_with_a_call(scripted, client):
    scripted.script(CALL)
    tools = [openai.pydantic_function_tool(GetWeather)]
    answer = client.responses.parse(model="tiny", input="Bern?", tools=tools)
    reasoning, message, call = answer.output
    assert reasoning.content[0].text == "They ask for Bern."
    assert message.content[0].text == answer.output_text == "I look it up."
    assert call.parsed_arguments == GetWeather(city="Bern")
    assert (call.call_id, call.status, answer.status) == ("call_1", "completed", "completed")
    assert answer.incomplete_details is None and answer.completed_at is not None
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 9, 16)
    assert usage.input_tokens_details.cached_tokens == 4
    assert usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("truncation", ["disabled", "auto"])
def test_the_input_is_counted_as_it_was_sent(scripted, client, truncation):
    """Also one that is longer than the context, which `truncation` would shorten."""
    room = scripted.first.validator.limits.max_model_len
    turn = {"role": "user", "content": "a b c d " * (room // 10)}
    lengths = [
        client.responses.input_tokens.count(model="tiny", input=[turn] * count, truncation=truncation)
        for count in (1, 2, 20)
    ]
    assert {one.object for one in lengths} == {"response.input_tokens"}
    one, two, twenty = (each.input_tokens for each in lengths)
    assert twenty - one == 19 * (two - one) and twenty > room
    plain, more = (
        client.responses.input_tokens.count(model="tiny", input="Bern?", **one)
        for one in ({}, {"tools": [WEATHER], "instructions": "Be brief."})
    )
    assert more.input_tokens > plain.input_tokens


def test_a_streamed_answer_with_a_call(scripted, client):
    scripted.script(CALL)
    tools = [openai.pydantic_function_tool(GetWeather)]
    with client.responses.stream(model="tiny", input="Bern?", tools=tools) as stream:
        events, answer = list(stream), stream.get_final_response()
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert [event.delta for event in deltas] == [
        part.text for part in CALL if not isinstance(part, CallBegin)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert answer.output[2].parsed_arguments == GetWeather(city="Bern")
    assert events[-1].type == "response.completed"
    # The same items as in a whole answer, but for their ids
    raw = client.responses.create(model="tiny", input="Bern?", stream=True)
    (ended,) = [event.response for event in raw if event.type == "response.completed"]
    whole = client.responses.create(model="tiny", input="Bern?")
    assert [one.to_dict() | {"id": ""} for one in ended.output] == [
        one.to_dict() | {"id": ""} for one in whole.output
    ]


def test_a_call_and_its_result(scripted, client):
    """The answer's items and the result are the next request's input, as the package's guide has it."""
    scripted.script(CALL)
    items: list[Any] = [{"role": "user", "content": "Bern?"}]
    first = client.responses.create(model="tiny", input=items, tools=[WEATHER], tool_choice="required")
    items += first.output
    for call in first.output:
        if call.type == "function_call":
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"})
    scripted.script([ContentText("12 degrees in Bern")])
    second = client.responses.create(model="tiny", input=items, tools=[WEATHER], tool_choice="none")
    assert second.output_text == "12 degrees in Bern"
    (accepted,) = scripted.accepted
    shown = scripted.first.text.tokenizer.decode(accepted.prompt_tokens, skip_special_tokens=False)
    assert shown.index("Bern?") < shown.index("I look it up.") < shown.index("12 degrees")


def test_parse_reads_a_pydantic_model(scripted, client):
    scripted.script(PERSON)
    answer = client.responses.parse(model="tiny", input="Ada, 36", text_format=Person)
    assert answer.output_parsed == Person(name="Ada", age=36)
    assert scripted.accepted[0].grammar is not None
    with client.responses.stream(model="tiny", input="Ada, 36", text_format=Person) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_log_probabilities_are_those_of_the_text(scripted, client):
    scripted.script(CALL)
    answer = client.responses.create(model="tiny", input="a", include=["message.output_text.logprobs"])
    shown = answer.output[1].content[0].logprobs
    assert [one.logprob for one in shown] == [-0.5, -0.5]


def test_an_answer_that_the_limit_ends(scripted, client):
    scripted.script(CALL[:-1], "length")
    answer = client.responses.create(model="tiny", input="a")
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert [one.status for one in answer.output] == ["completed", "completed", "incomplete"]
    assert answer.output[2].arguments == '{"city":'


def test_an_error_within_a_stream(scripted, client):
    scripted.script(CALL[:4], error=EngineRequestError("the engine failed"))
    *_, error, failed = client.responses.create(model="tiny", input="a", stream=True)
    assert (error.type, error.message, failed.type) == ("error", "the engine failed", "response.failed")
    response = failed.response
    assert (response.status, response.error.code) == ("failed", "server_error")
    assert response.error.message == "the engine failed"
    # What was shown is not lost
    assert [one.status for one in response.output] == ["completed", "incomplete"]
    assert failed.sequence_number == error.sequence_number + 1


def test_a_grammars_dead_end_within_a_stream_is_the_requests(scripted, client):
    """Clients send what a server failed at again."""
    scripted.script(CALL[:4], error=GrammarDeadEndError("grammar: no token may come next", field="grammar"))
    *_, error, failed = client.responses.create(model="tiny", input="a", stream=True)
    assert (error.code, failed.response.error.code) == ("grammar_dead_end", "invalid_prompt")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_answer_is_an_http_error(stream, scripted, client):
    scripted.script([], error=UnavailableError("no worker"))
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="tiny", input="a", stream=stream)
    assert caught.value.status_code == 503
