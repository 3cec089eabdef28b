"""Both clients against a real gRPC server: the same tests for each, through one blocking interface."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import baton
from baton.client import Chunk
from cluster.errors import (
    AttemptsExhaustedError,
    CancelledError,
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from tests.baton.client_calls import AS_GIVEN, Streamer, blocking, by_asyncio
from tests.harness.stub_inference import StubRouter, text_of, token_at


@pytest.fixture(params=[blocking, by_asyncio], ids=["blocking", "asyncio"])
def stream(request: pytest.FixtureRequest) -> Streamer:
    streamer: Streamer = request.param
    return streamer


def test_stream_hands_out_chunks_and_ends_with_usage_and_timings(
    stream: Streamer, router: StubRouter
) -> None:
    chunks, completion = stream(router.address, "one two three", max_tokens=5, seed=9)
    expected = [token_at(9, 0, 3 + index) for index in range(5)]
    assert [chunk.token_ids[0] for chunk in chunks] == expected
    assert completion.text == "".join(map(text_of, expected)) == "".join(chunk.text for chunk in chunks)
    assert (completion.finish_reason, completion.seed, completion.model) == ("length", 9, "stub")
    assert completion.usage.prompt_tokens == 3
    assert completion.usage.cached_tokens == 2
    assert completion.timings.kv_bytes_shipped == 4096
    assert completion.timings.transport == "nixl"


def test_every_kind_of_prompt_arrives(stream: Streamer, router: StubRouter) -> None:
    stream(router.address, [5, 6, 7], max_tokens=1)
    stream(router.address, [{"role": "user", "content": "hi"}], max_tokens=1)
    tokens, chat = router.inference.requests
    assert list(tokens.token_ids.ids) == [5, 6, 7]
    assert (chat.chat.messages[0].role, chat.chat.messages[0].content) == ("user", "hi")


def test_options_left_out_stay_unset_and_zero_is_sent(stream: Streamer, router: StubRouter) -> None:
    stream(
        router.address, "x", max_tokens=1, temperature=0.0, stop=["a", "b"], logit_bias={3: -1.5}, logprobs=2
    )
    options = router.inference.requests[0].options
    assert options.HasField("temperature")
    assert options.temperature == 0.0
    assert not options.HasField("top_p")
    assert list(options.stop) == ["a", "b"]
    assert dict(options.logit_bias) == {3: -1.5}


def test_excluded_tokens_arrive(stream: Streamer, router: StubRouter) -> None:
    stream(router.address, "x", max_tokens=1, allowed_token_ids=(5, 7), bad_words=["a", " b"])
    stream(router.address, "x", max_tokens=1, allowed_token_ids=None, bad_words="ab")
    stream(router.address, "x", max_tokens=1, bad_words=[])
    sent = [one.options for one in router.inference.requests]
    assert [list(one.allowed_token_ids) for one in sent] == [[5, 7], [], []]
    assert [list(one.bad_words) for one in sent] == [["a", " b"], ["ab"], []]


def test_a_single_choice_may_be_a_text(stream: Streamer, router: StubRouter) -> None:
    """A text is a sequence of texts too: its characters are not the choices."""
    stream(router.address, "hi", choice="yes")
    assert list(router.inference.requests[0].options.grammar.choice.texts) == ["yes"]


def test_a_completion_has_log_probabilities_and_alternatives(stream: Streamer, router: StubRouter) -> None:
    _, completion = stream(router.address, "x", max_tokens=2, logprobs=2)
    assert [item.logprob for item in completion.choices[0].logprobs] == [-0.5, -0.5]
    assert completion.choices[0].logprobs[0].top == ((0, -1.0), (1, -2.0))


def test_log_probabilities_of_a_prompt_come_once(stream: Streamer, router: StubRouter) -> None:
    """Another router sends them all again, where the first one was lost within them."""
    router.inference.end_in_prompt_at = 3
    chunks, completion = stream(router.address, [5, 6, 7, 8], max_tokens=2, n=2, prompt_logprobs=1)
    assert [(one.logprob, one.rank, len(one.top)) for one in completion.prompt_logprobs] == [
        (-1.0, 2, 1),
        (-2.0, 2, 1),
        (-3.0, 2, 1),
    ]
    assert completion.prompt_logprobs == tuple(one for chunk in chunks for one in chunk.prompt_logprobs)
    assert completion.reconnects == 1


def test_each_of_several_choices_has_its_own_tokens(stream: Streamer, router: StubRouter) -> None:
    _, completion = stream(router.address, "x", max_tokens=3, n=2, seed=1)
    for index, choice in enumerate(completion.choices):
        assert choice.token_ids == tuple(token_at(1, index, 1 + step) for step in range(3))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temprature": 1.0}, "temprature"),
        ({"stop": ["\ud800"]}, "stop"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),  # on the wire it would allow all
        ({"bad_words": [5]}, "bad_words"),
    ],
)
def test_values_that_the_wire_cannot_carry_are_refused_by_name(
    stream: Streamer, options: Any, field: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        stream("127.0.0.1:1", "x", **options)
    assert caught.value.field == field


@pytest.mark.parametrize("prompt", [[-1], [1.5], "\udc80", [{"content": "no role"}]])
def test_bad_prompts_are_refused(stream: Streamer, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        stream("127.0.0.1:1", prompt)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthError("too long", field="max_tokens", limit="4096"),
        OverloadedError("busy", retry_after_seconds=2.5),
    ],
)
def test_typed_errors_cross_the_wire(stream: Streamer, router: StubRouter, error: Any) -> None:
    router.inference.error = error
    with pytest.raises(type(error)) as caught:
        stream(router.address, "x")
    assert caught.value.message == error.message
    assert caught.value.field == error.field
    assert caught.value.limit == error.limit
    assert caught.value.retry_after_seconds == error.retry_after_seconds


def test_a_deadline_ends_the_stream_and_cancels_it_at_the_router(
    stream: Streamer, router: StubRouter
) -> None:
    router.inference.hang_after = 2
    with pytest.raises(DeadlineError):
        stream(router.address, "x", timeout_seconds=0.3)
    assert router.inference.cancelled.wait(5)


def test_no_router_answers(stream: Streamer) -> None:
    with pytest.raises(UnavailableError):
        stream(["127.0.0.1:1", "127.0.0.1:2"], "x", timeout_seconds=20)


def test_a_token_left_out_is_an_error(stream: Streamer, router: StubRouter) -> None:
    router.inference.skip_position_at = 2
    with pytest.raises(InternalError, match="position"):
        stream(router.address, "x", max_tokens=5)


def test_moves_on_to_a_router_that_answers(stream: Streamer, router: StubRouter) -> None:
    _, completion = stream(["127.0.0.1:1", router.address], "x", max_tokens=2)
    assert completion.reconnects == 1


def test_resumes_at_another_router_without_losing_or_repeating_a_token(
    stream: Streamer, router: StubRouter, other: StubRouter
) -> None:
    router.inference.hang_after = 3
    router.inference.default_seed = 77  # drawn by the first router, unknown to the second

    def kill(chunks: list[Chunk]) -> None:
        if len(chunks) == 3:
            router.stop()

    chunks, completion = stream([router.address, other.address], "a b", kill, max_tokens=8)
    expected = tuple(token_at(77, 0, 2 + index) for index in range(8))
    assert completion.token_ids == expected
    assert [chunk.token_ids[0] for chunk in chunks] == list(expected)
    assert completion.reconnects == 1
    resumed = other.inference.requests[0]
    assert list(resumed.resume_tokens.ids) == list(expected[:3])
    assert resumed.options.seed == 77
    assert resumed.request_id == completion.request_id


def test_a_stream_that_just_ends_is_resumed(stream: Streamer, router: StubRouter, other: StubRouter) -> None:
    router.inference.end_early_at = 2
    _, completion = stream([router.address, other.address], "a b", max_tokens=4)
    assert len(completion.token_ids) == 4
    assert completion.reconnects == 1


def test_several_choices_are_not_resumed(stream: Streamer, router: StubRouter, other: StubRouter) -> None:
    router.inference.end_early_at = 2
    with pytest.raises(UnavailableError):
        stream([router.address, other.address], "a b", max_tokens=4, n=2)
    assert not other.inference.requests


def test_reconnects_are_bounded(stream: Streamer, router: StubRouter, other: StubRouter) -> None:
    router.inference.end_early_at = other.inference.end_early_at = 0
    with pytest.raises(UnavailableError):
        stream([router.address, other.address], "x", settings={"max_reconnects": 2})
    assert len(router.inference.requests) + len(other.inference.requests) == 3


def test_a_single_address_is_asked_twice(stream: Streamer, router: StubRouter) -> None:
    """Another process of the router, or another router, may be behind it."""
    router.inference.end_early_at = 1
    with pytest.raises(UnavailableError):
        stream(router.address, "x")
    assert len(router.inference.requests) == 2


def test_a_request_that_no_router_can_serve_is_not_retried(
    stream: Streamer, router: StubRouter, other: StubRouter
) -> None:
    """A request that kills workers would kill as many again."""
    router.inference.error = AttemptsExhaustedError("gave up after 8 attempts")
    with pytest.raises(AttemptsExhaustedError):
        stream([router.address, other.address], "x")
    assert not other.inference.requests
    router.inference.error = UnavailableError("no worker here")
    assert stream([router.address, other.address], "x", max_tokens=2)[1].reconnects == 1


def test_closing_the_stream_cancels_the_request(router: StubRouter) -> None:
    router.inference.hang_after = 2
    with baton.Client(router.address) as client:
        stream = client.stream("x", max_tokens=5)
        next(stream)
        stream.close()
        assert router.inference.cancelled.wait(5)
        assert list(stream) == []


def close_when_hanging(router: StubRouter, closed: baton.Client | baton.client.Stream) -> None:
    router.inference.hanging.wait(5)
    closed.close()


def test_closing_from_another_thread_ends_the_wait(router: StubRouter) -> None:
    router.inference.hang_after = 1
    with baton.Client(router.address) as client, client.stream("x", max_tokens=5) as stream:
        closer = threading.Thread(target=close_when_hanging, args=(router, stream))
        closer.start()
        assert len(list(stream)) <= 1
        closer.join(5)


async def test_cancelling_the_task_cancels_the_request(router: StubRouter) -> None:
    router.inference.hang_after = 1
    async with baton.AsyncClient(router.address) as client:
        task = asyncio.create_task(client.generate("x", max_tokens=5))
        assert await asyncio.to_thread(router.inference.hanging.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.inference.cancelled.wait, 5)


async def test_aclose_cancels_the_request(router: StubRouter) -> None:
    router.inference.hang_after = 2
    async with baton.AsyncClient(router.address) as client:
        stream = client.stream("x", max_tokens=5)
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(router.inference.cancelled.wait, 5)


async def test_tokenize_and_models_of_both_clients(router: StubRouter) -> None:
    async with baton.AsyncClient(["127.0.0.1:1", router.address], **AS_GIVEN) as client:
        assert await client.tokenize("a bb ccc") == [1, 2, 3]
        assert (await client.models())[0].id == "stub"
    with baton.Client(["127.0.0.1:1", router.address], **AS_GIVEN) as blocking:
        assert blocking.tokenize([{"role": "user", "content": "dddd"}]) == [4]
        assert blocking.models()[0].max_model_len == 4096


def test_generate_is_the_stream_in_one(router: StubRouter) -> None:
    with baton.Client(router.address) as client:
        assert client.generate("a b", max_tokens=3, seed=5).token_ids == tuple(
            token_at(5, 0, 2 + i) for i in range(3)
        )


async def test_aclose_from_another_task_ends_the_wait(router: StubRouter) -> None:
    router.inference.hang_after = 1
    async with baton.AsyncClient(router.address) as client:
        stream = client.stream("x", max_tokens=5)

        async def close() -> None:
            await asyncio.to_thread(router.inference.hanging.wait, 5)
            await stream.aclose()

        closer = asyncio.create_task(close())
        assert len([chunk async for chunk in stream]) <= 1
        await closer


def test_closing_the_client_ends_its_streams(router: StubRouter, other: StubRouter) -> None:
    router.inference.hang_after = 2
    client = baton.Client([router.address, other.address], **AS_GIVEN)
    stream = client.stream("x", max_tokens=5)
    closer = threading.Thread(target=close_when_hanging, args=(router, client))
    closer.start()
    with pytest.raises(CancelledError):
        list(stream)
    closer.join(5)
    assert not other.inference.requests
    with pytest.raises(CancelledError):
        client.stream("x")


async def test_aclosing_the_client_ends_its_streams(router: StubRouter, other: StubRouter) -> None:
    router.inference.hang_after = 2
    client = baton.AsyncClient([router.address, other.address], **AS_GIVEN)
    stream = client.stream("x", max_tokens=5)

    async def close() -> None:
        await asyncio.to_thread(router.inference.hanging.wait, 5)
        await client.aclose()

    closer = asyncio.create_task(close())
    with pytest.raises(CancelledError):
        [chunk async for chunk in stream]
    await closer
    assert not other.inference.requests


def test_a_stream_that_is_closed_while_it_moves_on_stays_closed(
    router: StubRouter, other: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    router.inference.end_early_at = 1
    with baton.Client([router.address, other.address], **AS_GIVEN) as client:
        stream = client.stream("x", max_tokens=5)

        def close_instead(*_: object) -> float:
            stream.close()
            return 0.0

        monkeypatch.setattr("baton.client.base.pause_seconds", close_instead)
        assert len(list(stream)) == 1
    assert not other.inference.requests


def test_a_call_that_a_close_overtakes_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    client = baton.Client("127.0.0.1:1")
    before = client._stub()
    client.close()
    monkeypatch.setattr(client, "_stub", lambda: before)
    for call in (client.models, lambda: client.tokenize("a"), lambda: client.generate("a")):
        with pytest.raises(CancelledError, match="closed"):
            call()
