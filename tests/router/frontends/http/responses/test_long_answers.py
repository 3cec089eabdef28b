"""The end of a streamed response repeats its log probabilities four times: none is copied before the client reads it, and
what is kept of them counts in the budget of bodies."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from router.admission.admission import ByteBudget
from router.frontends.http.responses.answer import ResponseEvents, WholeResponse
from router.frontends.http.responses.request import LOGPROBS
from router.frontends.http.responses.shape import ResponseShape
from router.request.answer_parts import CallArguments, CallBegin, ContentText, Part, ReasoningText
from router.request.completion import Delta, Outcome
from tests.harness.waiting import wait_for
from tests.router.frontends.golden.stub_gateway import StubDispatcher
from tests.router.frontends.http.responses.conftest import ScriptedGateway
from wire import common_pb2, inference_pb2

MIB = 1 << 20
TOKENS = 1500
TOP = [common_pb2.TokenLogprob(token_id=i, logprob=-1.0 - i / 7) for i in range(20)]
TOKEN: Any = common_pb2.Token(token_id=5, logprob=-0.5, top_logprobs=TOP)
OUTCOME = Outcome(inference_pb2.Usage(), inference_pb2.Timings())


@pytest.fixture
def shape(scripted: ScriptedGateway) -> ResponseShape:
    completion: Any = None
    return ResponseShape(completion, scripted.first.text, b'"echo":1', True, False, False)


def deltas(*, call: bool = False) -> Iterator[Delta]:
    for _ in range(TOKENS):
        yield Delta(0, "", (TOKEN,), None, (ContentText("x"),))
    parts = (CallBegin(0, "c", "f"),) if call else ()
    yield Delta(0, "", (), "tool_calls" if call else "stop", parts)


@pytest.mark.parametrize("call", [False, True])
def test_the_end_is_made_as_it_is_written(shape: ResponseShape, call: bool) -> None:
    """Also that of an item in the midst of an answer. Together it was four times the log probabilities."""
    events, whole = ResponseEvents(shape), WholeResponse(shape)
    for delta in deltas():
        list(events.of([delta]))
        whole.add([delta])
    kept = events.kept
    assert 1.5 * MIB < kept < 4 * MIB
    tracemalloc.start()
    parts: list[Any] = (
        [events.of([Delta(0, "", (), "tool_calls", (CallBegin(0, "c", "f"),))])] if call else []
    )
    parts.append(events.end([OUTCOME]))
    assert not any(isinstance(part, bytes) for part in parts)
    size = 0
    for part in parts:
        for piece in part:
            size += len(piece)
    assert tracemalloc.get_traced_memory()[1] < kept / 2
    tracemalloc.stop()
    assert size > 4 * kept
    body = orjson.loads(b"".join(whole.body([OUTCOME])))
    assert len(body["output"][0]["content"][0]["logprobs"]) == TOKENS


def test_a_long_text_is_encoded_once_and_what_repeats_the_request_is_not_copied(shape: ResponseShape) -> None:
    """With instructions of 2 MiB the first events took 8 ms of the event loop, the last ones of a long answer 15 ms."""
    echo = b'"instructions":"' + b"x" * MIB + b'"'
    shape = replace(shape, echo=echo, logprobs=False)
    events, whole = ResponseEvents(shape), WholeResponse(shape)
    parts: list[Part] = [ReasoningText("r\n" * 50_000), ContentText("c\n" * 50_000), CallBegin(0, "c", "f")]
    last = Delta(0, "", (), "stop", (*parts, CallArguments(0, " " * 100_000)))
    written: list[bytes] = []
    for given in (events.of([last]), events.end([OUTCOME])):
        assert not isinstance(given, bytes)
        written += given
    assert sum(piece is echo for piece in written) == 3
    texts = [orjson.dumps(one.text) for one in last.parts or () if not isinstance(one, CallBegin)]
    for text in texts:  # of its delta, then of three events of its item and of the whole response
        assert len({id(piece) for piece in written if piece == text}) == 1
        assert written.count(text) == (3 if text == texts[-1] else 4)
    whole.add([last])
    shown = [orjson.loads(one[6:]) for one in b"".join(written).split(b"\n") if one.startswith(b"data: ")]
    made = orjson.loads(b"".join(whole.body([OUTCOME])))
    assert [one["sequence_number"] for one in shown] == [*range(len(shown))]
    for one in (shown[0]["response"], shown[-1]["response"], made):
        assert one["instructions"] == "x" * MIB
    assert [_texts(one) for one in shown[-1]["response"]["output"]] == [_texts(one) for one in made["output"]]
    assert [*map(_texts, made["output"])] == ["r\n" * 50_000, "c\n" * 50_000, " " * 100_000]


def _texts(item: dict[str, Any]) -> str:
    shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return str(shown)


@pytest.mark.parametrize("room", [8 * MIB, MIB])
def test_what_is_kept_for_the_end_counts_until_it_is_read(
    scripted: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A stream that keeps more than there is room for ends with an error."""
    bodies = ByteBudget(room, room, lambda tenant: None)
    monkeypatch.setattr(scripted.admission, "bodies", bodies)
    scripted.script([])
    held: list[int] = []

    class Dispatcher(StubDispatcher):
        outcome = OUTCOME

        def start(self, queue: Any) -> None:
            for delta in deltas():
                queue.add(delta)
            queue.end()

        def stop(self) -> None:
            held.append(bodies.held)

    monkeypatch.setattr(scripted, "dispatcher", lambda completion, _: Dispatcher(completion, 0))
    body = {"input": "a", "stream": True, "include": [LOGPROBS], "top_logprobs": 20, "max_output_tokens": 400}
    answer = httpx.post(f"{scripted.url}/responses", json=body, timeout=60).text
    last = orjson.loads(answer.rstrip().rpartition("data: ")[2])
    if room > MIB:
        assert last["type"] == "response.completed" and held[0] > MIB
    else:
        assert (
            last["type"] == "response.failed" and last["response"]["error"]["code"] == "rate_limit_exceeded"
        )
    wait_for(lambda: bodies.held == 0, 10, "the answer has ended")
