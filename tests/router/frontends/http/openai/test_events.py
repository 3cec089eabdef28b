"""The events of a stream are its shape's chunks, whichever way they are encoded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.frontends.http.openai.events import Events
from router.frontends.http.openai.requests import StreamOptions
from router.frontends.http.openai.shapes import ChatShape, CompletionShape, Shape
from router.request.completion import Completion, Delta, Outcome
from router.text.tokenizer import ModelText
from wire import common_pb2, inference_pb2

MODEL = Path(__file__).resolve().parents[5] / "demo" / "model"
TEXTS = ["", 'a "quoted" text', "\U0001f642\n", "\x00\\"]


@pytest.fixture(scope="module")
def text() -> Any:
    model = ModelText(MODEL)
    yield model
    model.close()


@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
@pytest.mark.parametrize(
    "more", [{}, {"token_ids": True}, {"logprobs": True}, {"usage": True}, {"so_far": True}]
)
def test_each_delta_is_its_shapes_chunk(kind: type[Shape], more: dict[str, bool], text: ModelText) -> None:
    given = SimpleNamespace(
        **{"token_ids": False, "logprobs": False, "usage": False, "so_far": False, **more}
    )
    sampling = common_pb2.SamplingParams(logprobs=given.logprobs)
    wanted = StreamOptions(include_usage=given.usage, continuous_usage_stats=given.so_far)

    def shape() -> Shape:
        return kind(Completion("id", "m", [1], sampling), text, 0, "id", given.token_ids)

    events, same = Events(shape(), 2, wanted, 1), shape()
    token = (common_pb2.Token(token_id=300, logprob=-0.5),)
    deltas = [Delta(choice, one, token) for one in TEXTS for choice in (0, 1)]
    deltas += [Delta(0, "end", token, "stop"), Delta(1, "end", token, "length")]
    sent = (
        events.of(deltas) + events.end([Outcome(inference_pb2.Usage(), inference_pb2.Timings())])
    ).decode()
    *events_sent, done = sent[6:-2].split("\n\ndata: ")
    assert done == "[DONE]"
    chunks = [json.loads(one) for one in events_sent]
    seen: set[int] = set()
    for delta, chunk in zip(deltas[:-1], chunks, strict=False):
        choice = same.delta(delta.choice, delta, delta.choice not in seen)
        seen.add(delta.choice)
        usage = {key: chunk.pop(key) for key in ("usage",) if key in chunk}
        assert chunk == json.loads(json.dumps(same.chunk([choice])))
        assert bool(usage) is (given.usage or given.so_far)
        assert bool(usage.get("usage")) is given.so_far
