"""Log probabilities of a message are those of its text, and of no other token of the answer."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.dispatch.choice import ChoiceStream
from router.frontends.http.responses.answer import WholeResponse
from router.frontends.http.responses.shape import ResponseShape
from router.request.completion import Completion, Outcome
from router.text.parsers.registry import format_of
from tests.router.frontends.http.responses.conftest import ScriptedGateway
from wire import common_pb2, inference_pb2

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def answered(
    gateway: ScriptedGateway, written: str | list[int], tools: str = "", reasoning: str = "", stop: Any = ()
) -> list[dict[str, Any]]:
    """The items of an answer that has this text, or these tokens, token by token."""
    text = gateway.first.text
    parsed = format_of(tools, reasoning, opened=False, special={}) if tools or reasoning else None
    completion = Completion("r", "tiny", [5], common_pb2.SamplingParams(), answer_format=parsed, stop=stop)
    stream = ChoiceStream(0, completion, text)
    answer = WholeResponse(ResponseShape(completion, text, b'"echo":1', True, False, False))
    ids = (
        written if isinstance(written, list) else text.tokenizer.encode(written, add_special_tokens=False).ids
    )
    for place, token_id in enumerate([*ids, 2], 1):
        finish: Any = common_pb2.FINISH_REASON_STOP if place > len(ids) else 0
        delta = stream.take(
            common_pb2.Token(position=place, token_id=token_id, logprob=-place, finish=finish)
        )
        assert delta is not None
        answer.add([delta])
    body = b"".join(answer.body([Outcome(inference_pb2.Usage(), inference_pb2.Timings())]))
    output: list[dict[str, Any]] = orjson.loads(body)["output"]
    return output


@pytest.mark.parametrize(
    ("written", "tools", "reasoning", "content"),
    [
        ("Hello there, world", "", "", "Hello there, world"),
        ("<think>\nHm, one < two.\n</think>\n\nYes: a < b, so it is.", "", "think", "Yes: a < b, so it is."),
        (f"Let me see.\n\n{CALL}", "hermes", "", "Let me see."),
        (f"{CALL}\nIt is <done", "hermes", "think", "It is <done"),
        # The marker before it has this in its own text, too
        ("<think>\nHm.\n</think>\n\nin short", "", "think", "in short"),
        (f"{CALL}\ntool is in use", "hermes", "", "tool is in use"),
    ],
)
def test_they_are_those_of_the_text(scripted, written, tools, reasoning, content):
    (message,) = (one for one in answered(scripted, written, tools, reasoning) if one["type"] == "message")
    (part,) = message["content"]
    assert part["text"] == content
    tokens = b"".join(bytes(one["bytes"]) for one in part["logprobs"])
    # A token may begin before the text, or end behind it
    assert content.encode() in tokens and len(tokens) < len(content) + 6, tokens
    places = [-one["logprob"] for one in part["logprobs"]]
    assert places == [places[0] + number for number in range(len(places))], "one behind the other"


def test_a_text_that_waits_for_a_stop_string_is_that_of_later_tokens(scripted):
    """The first piece of a text was taken for the last one like it, and the tokens before that were left out."""
    (a,) = scripted.first.text.tokenizer.encode("a", add_special_tokens=False).ids
    (message,) = answered(scripted, [a, a, a], stop=("ab",))
    (part,) = message["content"]
    assert part["text"] == "aaa"
    assert [-one["logprob"] for one in part["logprobs"]] == [1, 2, 3]


def test_what_is_between_two_messages_of_gpt_oss_has_none(scripted):
    """The markers between them, and the name of the second one's channel, were taken for its text."""
    behind = "<|end|><|start|>assistant<|channel|>final<|message|>"
    written = f"<|channel|>commentary<|message|>One final step.{behind}In short: final."
    (message,) = answered(scripted, written, reasoning="gpt_oss")
    (part,) = message["content"]
    assert part["text"] == "One final step.\nIn short: final."
    tokens = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
    assert "One final step." in tokens and "In short: final." in tokens
    assert "assistant" not in tokens and "channel" not in tokens
