"""The answer of Generate: every token once, in order, joined while its client does not read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config.router import RouterConfig
from cluster.errors import CancelledError, PeerLostError
from cluster.security.keys import ANYONE
from router.dispatch.turn import Turn
from router.frontends.grpc.refusal import refusing
from router.frontends.grpc.stream import GenerateStream
from router.link.token import PlainToken
from router.request.completion import Completion, Delta, FinishReason
from tests.harness.waiting import turns, until
from tests.router.frontends.grpc.stub_call import StubCall, StubDispatcher, context
from wire import common_pb2

SENT = 100  # tokens of one burst


class Stream:
    """One stream, its call and its dispatcher, without the pace between pieces."""

    def __init__(self, write_seconds: float = 600.0) -> None:
        self.call, self.dispatcher = StubCall(), StubDispatcher()
        completion = Completion("one", "tiny", [1, 2], common_pb2.SamplingParams(seed=42), n=2)
        dispatcher: Any = self.dispatcher
        self.stream = GenerateStream(dispatcher, completion, ANYONE)
        config = RouterConfig(model="tiny", write_seconds=write_seconds)
        self.passing = asyncio.ensure_future(self.stream.pass_to(context(self.call), config, Turn()))

    async def begun(self) -> Stream:
        await turns()
        self.dispatcher.queue._pace = 0.0
        return self

    def add(self, position: int, choice: int = 0, finish: FinishReason | None = None) -> None:
        token = PlainToken(choice, position, 300 + position)
        self.dispatcher.queue.add(Delta(choice, f"{position} ", (token,), finish))

    async def over(self) -> None:
        while not self.passing.done():
            await turns(1)
            if self.call.writing:
                await self.call.read()
        await self.passing

    @property
    def texts(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for one in self.call.responses:
            texts[one.chunk.choice] = texts.get(one.chunk.choice, "") + one.chunk.text
        return texts


@pytest.fixture
async def stream() -> Stream:
    return await Stream().begun()


async def test_the_first_message_carries_started_and_the_last_one_completed(stream: Stream) -> None:
    stream.add(0)
    await turns()
    stream.add(1, finish="length")
    stream.dispatcher.queue.end()
    await stream.over()
    first, second, last = stream.call.responses
    assert first.started.request_id == "one" and first.started.seed == 42
    assert first.started.resume_ticket == b"ticket" and first.started.prompt_tokens == 2
    assert [token.position for token in first.chunk.tokens] == [0] and first.chunk.text == "0 "
    assert not second.HasField("started") and second.chunk.finish_reason == "length"
    assert last.completed.usage == stream.dispatcher.outcome.usage
    assert last.completed.timings == stream.dispatcher.outcome.timings
    assert stream.dispatcher.stopped


async def test_a_charged_request_gets_its_ticket_before_its_first_token(stream: Stream) -> None:
    stream.dispatcher.on_charged()
    stream.add(0, finish="stop")
    await turns()
    assert [one.HasField("started") for one in stream.call.responses] == [True]
    stream.dispatcher.queue.end()
    await stream.over()
    assert [one.HasField("started") for one in stream.call.responses] == [True, False, False]
    assert stream.call.tokens == [0]


async def test_what_arrives_during_a_write_becomes_one_message(stream: Stream) -> None:
    for position in range(SENT):
        stream.add(position)
        await turns()
    assert stream.call.tokens == [0]
    await stream.call.read()
    assert stream.call.tokens == list(range(SENT)) and len(stream.call.begun) == 2
    stream.passing.cancel()


async def test_nothing_is_kept_beside_the_queue_or_granted_for_a_client_that_does_not_read(
    stream: Stream,
) -> None:
    """What the queue keeps is bounded by the credit that it does not give."""
    granted: list[int] = []
    stream.add(0)
    await turns()
    stream.dispatcher.queue.when_drained(lambda: granted.append(len(stream.call.begun)))
    for position in range(1, SENT):
        stream.add(position)
        await turns()
    assert not stream.stream._writer._messages and not granted
    await stream.call.read()
    assert not granted
    await stream.call.read()
    assert granted == [2]
    stream.passing.cancel()


async def test_a_failure_follows_what_came_before_it(stream: Stream) -> None:
    stream.add(0)
    await turns()
    stream.add(1)
    stream.dispatcher.queue.fail(PeerLostError("lost"))
    await turns()
    assert not stream.passing.done()
    with pytest.raises(PeerLostError):
        await stream.over()
    assert stream.call.tokens == [0, 1] and not any(
        one.HasField("completed") for one in stream.call.responses
    )


async def test_a_client_that_reads_nothing_ends_its_request() -> None:
    stream = await Stream(write_seconds=0.02).begun()
    stream.add(0)
    await until(stream.passing.done, "the request has ended", 5)
    with pytest.raises(CancelledError, match="write_seconds"):
        await stream.passing
    assert stream.dispatcher.stopped


async def test_also_when_only_the_end_is_unread() -> None:
    stream = await Stream(write_seconds=0.02).begun()
    stream.add(0, finish="stop")
    stream.dispatcher.queue.end()
    await until(stream.passing.done, "the request has ended", 5)
    with pytest.raises(CancelledError, match="write_seconds"):
        await stream.passing


async def test_a_write_that_fails_ends_its_request(stream: Stream) -> None:
    stream.call.failure = ValueError("the client left")
    stream.add(0)
    await turns()
    await stream.call.read()
    with pytest.raises(ValueError, match="left"):
        await asyncio.wait_for(stream.passing, 5)
    assert stream.dispatcher.stopped


async def test_a_cancelled_call_stops_its_request(stream: Stream) -> None:
    stream.add(0)
    await turns()
    stream.passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stream.passing
    await stream.call.read()
    assert stream.dispatcher.stopped and stream.call.tokens == [0]


STEPS = st.lists(st.sampled_from(["a", "b", "read", "turn"]), max_size=60)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_every_token_comes_once_in_order_and_before_its_finish(steps: list[str]) -> None:
    async def run() -> None:
        stream = await Stream().begun()
        sent = [0, 0]
        for step in steps:
            if step == "turn":
                await turns(1)
            elif step == "read":
                if stream.call.writing:
                    await stream.call.read()
            else:
                choice = "ab".index(step)
                stream.add(sent[choice], choice)
                sent[choice] += 1
        for choice in (0, 1):
            stream.add(sent[choice], choice, "length")
        stream.dispatcher.queue.end()
        await stream.over()
        *chunks, last = stream.call.responses
        assert last.HasField("completed")
        for choice in (0, 1):
            own = [one.chunk for one in chunks if one.chunk.choice == choice]
            positions = [token.position for one in own for token in one.tokens]
            assert positions == list(range(sent[choice] + 1))
            assert stream.texts[choice] == "".join(f"{position} " for position in positions)
            assert [one.finish_reason for one in own if one.finish_reason] == ["length"]
            assert own[-1].finish_reason == "length"

    asyncio.run(run())


async def test_a_stream_whose_metadata_waited_too_long_gets_its_status_once_they_are_written() -> None:
    """gRPC refuses a status while they wait: the call of a client that read on later stayed open without one."""
    call, dispatcher = StubCall(), StubDispatcher()
    steps, read_on, given_up = list[str](), asyncio.Event(), asyncio.Event()
    completion = Completion("one", "tiny", [1, 2], common_pb2.SamplingParams(seed=42))
    made = GenerateStream(cast(Any, dispatcher), completion, ANYONE)

    async def metadata(_: object) -> None:
        await asyncio.ensure_future(read_on.wait())
        steps.append("metadata")

    async def abort(*_: object, **__: object) -> None:
        steps.append("status")
        raise asyncio.CancelledError

    async def generate(_: object, context: Any) -> None:
        try:
            await made.pass_to(context, RouterConfig(model="tiny", write_seconds=0.05), Turn())
        finally:
            given_up.set()

    stub: Any = call
    stub.send_initial_metadata, stub.abort = metadata, abort
    serving = asyncio.ensure_future(refusing(generate)(cast(Any, None), context(call)))
    await turns()
    dispatcher.on_charged()
    async with asyncio.timeout(10):
        await given_up.wait()
        await turns()
        assert steps == []
        read_on.set()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert steps == ["metadata", "status"] and call.begun == []
