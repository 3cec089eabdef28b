"""Log probabilities of tokens that are parts of characters, whole and in the chunks of a stream."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from router.frontends.http.connection.long_body import Lists
from router.frontends.http.openai.events import Events
from router.frontends.http.openai.requests import StreamOptions
from router.frontends.http.openai.shapes import (
    Answer,
    ChatShape,
    CompletionShape,
    PromptIds,
    PromptShown,
    WholeShape,
)
from router.request.completion import Completion, Delta, Outcome
from router.text.tokenizer import ModelText
from wire import common_pb2, inference_pb2

MODEL = Path(__file__).resolve().parents[5] / "demo" / "model"
SMILE = "\U0001f642"


@pytest.fixture(scope="module")
def text():
    model = ModelText(MODEL)
    yield model
    model.close()


@pytest.fixture
def tokens(text):
    """Of a word and a smile, which takes four; each names the next one as its alternative."""
    ids = text.tokenizer.encode(f" a{SMILE}{SMILE}", add_special_tokens=False).ids
    following = [*ids[1:], ids[0]]
    return [
        common_pb2.Token(
            position=1,
            token_id=one,
            logprob=-0.5,
            top_logprobs=[common_pb2.TokenLogprob(token_id=other, logprob=-1.0)],
        )
        for one, other in zip(ids, following, strict=True)
    ]


def shape(kind, text):
    completion = Completion("id", "m", [1], common_pb2.SamplingParams(logprobs=True, top_logprobs=1))
    return kind(completion, text, 0, "id", False)


def shown(made, answer):
    lists = Lists()
    return orjson.loads(b"".join(lists.encode(made.choice(answer, lists))))


def whole(made, tokens):
    """Log probabilities of a whole answer whose tokens came in two deltas and an empty one."""
    answer = Answer(made, 0)
    for part in (tokens[:2], (), tokens[2:]):
        answer.add(Delta(0, "", tuple(part)))
    return shown(made, answer)["logprobs"]


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
def test_a_whole_answer_shows_what_its_stream_shows(kind, text, tokens):
    at_once = kind(shape(kind, text).completion, text, 0, "id", False).logprobs(0, tokens)
    assert whole(shape(kind, text), tokens) == orjson.loads(orjson.dumps(at_once))
    nothing = shape(kind, text)
    assert shown(nothing, Answer(nothing, 0))["logprobs"] == nothing.logprobs(0, ())


def test_the_bytes_of_a_chats_tokens_make_the_character(text, tokens):
    content = whole(shape(ChatShape, text), tokens)["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == f" a{SMILE}{SMILE}"
    assert [one["token"] for one in content[:3]] == [" a", "\\xf0", "\\x9f"]
    assert [one["bytes"] for one in content[1:5]] == [[0xF0], [0x9F], [0x99], [0x82]]
    assert content[1]["top_logprobs"] == [{"token": "\\x9f", "logprob": -1.0, "bytes": [0x9F]}]


def test_a_completions_tokens_are_named_apart(text, tokens):
    shown = whole(shape(CompletionShape, text), tokens)
    assert shown["tokens"][:3] == [" a", "bytes:\\xf0", "bytes:\\x9f"]
    assert shown["top_logprobs"][0] == {" a": -0.5, "bytes:\\xf0": -1.0}
    assert shown["text_offset"] == [0, 2, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("count", [0, 1])
def test_a_completions_token_is_among_its_alternatives(text, tokens, count):
    """Also one that is none of the k most probable ones, as at OpenAI; a chat's are these alone."""
    sampling = common_pb2.SamplingParams(logprobs=True, top_logprobs=count)
    shown = CompletionShape(Completion("id", "m", [1], sampling), text, 0, "id", False).logprobs(0, tokens)
    assert shown is not None
    for name, logprob, top in zip(
        shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        assert top[name] == logprob and len(top) <= count + 1


def test_offsets_go_on_from_chunk_to_chunk_of_each_choice(text, tokens):
    streamed = shape(CompletionShape, text)
    offsets: dict[int, list[int]] = {0: [], 1: []}
    for one in tokens:
        for choice in offsets:
            shown = streamed.delta(choice, Delta(choice, "", (one,)), False)
            offsets[choice] += shown["logprobs"]["text_offset"]
    assert offsets[0] == offsets[1] == [0, 2, 2, 2, 2, 3, 3, 3, 3]


def with_prompt_ids(kind, text):
    """Of two prompts, with two choices each."""
    completion = Completion("id", "m", [1, 2], common_pb2.SamplingParams(), n=2)
    return kind(completion, text, 0, "id", True, prompt=PromptShown(ids=PromptIds([[1, 2], [3]], 2)))


def ended(choice):
    return Delta(choice, "x", (common_pb2.Token(choice=choice, token_id=5),), "length")


OUTCOMES = [Outcome(inference_pb2.Usage(), inference_pb2.Timings())]


def test_a_whole_answer_has_its_prompts_token_ids(text):
    answer = WholeShape(with_prompt_ids(CompletionShape, text), 4)
    answer.add([ended(choice) for choice in range(4)])
    choices = orjson.loads(b"".join(answer.body(OUTCOMES)))["choices"]
    assert [one["prompt_token_ids"] for one in choices] == [[1, 2], [1, 2], [3], [3]]
    chat = WholeShape(with_prompt_ids(ChatShape, text), 2)
    chat.add([ended(choice) for choice in range(2)])
    body = orjson.loads(b"".join(chat.body(OUTCOMES)))
    assert body["prompt_token_ids"] == [1, 2]
    assert all(one["token_ids"] == [5] and "prompt_token_ids" not in one for one in body["choices"])


@pytest.mark.parametrize("usage", [{}, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize(("kind", "choices"), [(CompletionShape, 4), (ChatShape, 2), (ChatShape, 1)])
def test_a_stream_has_the_token_ids_of_each_prompt_once(text, kind, choices, usage):
    """Of several choices together they would be many times the request."""
    events = Events(with_prompt_ids(kind, text), choices, StreamOptions(**usage), 3)
    sent = b"".join(events.of([ended(choice)]) for choice in range(choices)) + events.end(OUTCOMES)
    chunks = [orjson.loads(one) for one in sent.decode().removeprefix("data: ").split("\n\ndata: ")[:-1]]
    found = [
        (one["choices"][0]["index"], place["prompt_token_ids"])
        for one in chunks
        if one["choices"]
        for place in ((one,) if kind is ChatShape else (one["choices"][0],))
        if "prompt_token_ids" in place
    ]
    assert found == [(0, [1, 2]), (2, [3])][: max(1, choices // 2)]


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
@pytest.mark.parametrize(
    ("more", "reason"), [({}, None), ({"stop_string": "end"}, "end"), ({"stop_token": 0}, 0)]
)
@pytest.mark.parametrize("rest", ["", "last text"])
def test_a_choice_that_has_ended_shows_what_of_the_request_ended_it(text, kind, more, reason, rest):
    """As vLLM does: always in a whole answer, and in a stream beside the finish reason."""
    token = (common_pb2.Token(token_id=5),)
    deltas = [Delta(0, "a", token), Delta(1, "b", token, "length"), Delta(0, rest, token, "stop", **more)]
    made = kind(Completion("id", "m", [1], common_pb2.SamplingParams(), n=2), text, 0, "id", False)
    whole = WholeShape(made, 2)
    whole.add(deltas)
    choices = orjson.loads(b"".join(whole.body(OUTCOMES)))["choices"]
    assert [one["stop_reason"] for one in choices] == [reason, None]
    events = Events(made, 2, StreamOptions(), 1)
    sent = (events.of(deltas) + events.end(OUTCOMES)).decode().removeprefix("data: ").split("\n\ndata: ")[:-1]
    chunks = [orjson.loads(one)["choices"][0] for one in sent]
    assert all(("stop_reason" in one) == (one["finish_reason"] is not None) for one in chunks)
    ends = {one["index"]: one["stop_reason"] for one in chunks if one["finish_reason"] is not None}
    assert ends == {0: reason, 1: None}
