"""Parsed answers as OpenAI's objects: whole, and in chunks of which each has one piece of one call."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from router.frontends.http.connection.long_body import Lists
from router.frontends.http.openai.events import Events
from router.frontends.http.openai.parts import WHOLE_VIEW, ChatView
from router.frontends.http.openai.requests import StreamOptions
from router.frontends.http.openai.shapes import Answer, ChatShape
from router.link.token import PlainToken
from router.request.answer_parts import CallArguments, CallBegin, ContentText, ReasoningText
from router.request.completion import Completion, Delta, Outcome
from wire import common_pb2, inference_pb2

TOKEN = (PlainToken(0, 1, 7),)
ANSWER = [
    (ReasoningText("hm"),),
    (),
    (ReasoningText("!"), ContentText("So: ")),
    (ContentText("look"),),
    (CallBegin(0, "a", "f"), CallArguments(0, '{"x":')),
    (CallArguments(0, "1}"), CallBegin(1, "b", "g"), CallArguments(1, "{}")),
    (),
]


def shape(view=WHOLE_VIEW, token_ids=False):
    source: Any = SimpleNamespace(marker_texts={}, parser=None)
    completion = Completion("id", "m", [1], common_pb2.SamplingParams(), answer_format=source)
    text: Any = None
    return ChatShape(completion, text, 0, "id", token_ids, view=view)


def deltas(answer=ANSWER, finish="tool_calls"):
    last = len(answer) - 1
    return [Delta(0, "t", TOKEN, finish if i == last else None, one) for i, one in enumerate(answer)]


def chunks(made, given):
    outcome = Outcome(inference_pb2.Usage(reasoning_tokens=2), inference_pb2.Timings())
    events = Events(made, 1, StreamOptions(include_usage=True), 1)
    sent = (events.of(given) + events.end([outcome])).decode()
    *shown, done = sent[6:-2].split("\n\ndata: ")
    assert done == "[DONE]"
    return [json.loads(one) for one in shown]


def test_a_stream_has_one_piece_of_one_call_in_a_chunk():
    *shown, usage = chunks(shape(), deltas())
    choices = [one["choices"][0] for one in shown]
    assert [one["delta"] for one in choices] == [
        {"role": "assistant", "reasoning_content": "hm", "reasoning": "hm"},
        {"content": "So: ", "reasoning_content": "!", "reasoning": "!"},
        {"content": "look"},
        {"tool_calls": [call(0, "", id="a", type="function", name="f")]},
        {"tool_calls": [call(0, '{"x":')]},
        {"tool_calls": [call(0, "1}")]},
        {"tool_calls": [call(1, "", id="b", type="function", name="g")]},
        {"tool_calls": [call(1, "{}")]},
        {"content": ""},
    ]
    assert [one["finish_reason"] for one in choices] == [None] * 8 + ["tool_calls"]
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def call(index, arguments, name=None, **more):
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"index": index, **more, "function": function}


@pytest.mark.parametrize("token_ids", [False, True])
def test_no_token_is_shown_twice_or_lost(token_ids):
    shown = chunks(shape(token_ids=token_ids), deltas())[:-1]
    ids = [one["choices"][0].get("token_ids", []) for one in shown]
    assert sum(map(len, ids)) == (len(ANSWER) if token_ids else 0)


def whole(answer, view=WHOLE_VIEW, finish="tool_calls"):
    made = shape(view)
    collected = Answer(made, 0)
    for delta in deltas(answer, finish):
        collected.add(delta)
    return json.loads(json.dumps(made.choice(collected, Lists())))


def test_a_whole_answer_has_calls_and_reasoning():
    choice = whole(ANSWER)
    assert choice["message"] == {
        "role": "assistant",
        "content": "So: look",
        "refusal": None,
        "reasoning_content": "hm!",
        "reasoning": "hm!",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_content_is_null_where_the_answer_is_calls_alone():
    assert whole(ANSWER[4:])["message"]["content"] is None
    assert whole([()])["message"] == {"role": "assistant", "content": "", "refusal": None}


def test_a_named_call_ends_with_stop():
    view = ChatView(named=True)
    assert whole(ANSWER, view)["finish_reason"] == "stop"
    assert chunks(shape(view), deltas())[-2]["choices"][0]["finish_reason"] == "stop"
    assert whole(ANSWER, view, "length")["finish_reason"] == "length"


def test_reasoning_may_be_left_out():
    view = ChatView(reasoning=False)
    assert "reasoning" not in json.dumps(whole(ANSWER, view))
    shown = chunks(shape(view), deltas())
    assert "hm" not in json.dumps(shown)
    assert shown[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
