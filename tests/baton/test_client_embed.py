"""`embed` of both clients against a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import baton
from baton.client import Embeddings
from cluster.errors import (
    AttemptsExhaustedError,
    CancelledError,
    ContextLengthError,
    InvalidRequestError,
    UnavailableError,
)
from tests.baton.client_calls import AS_GIVEN
from tests.harness.stub_inference import StubRouter

Embed = Callable[..., Embeddings]


def blocking(addresses: Any, inputs: Any, **options: Any) -> Embeddings:
    with baton.Client(addresses, **AS_GIVEN) as client:
        return client.embed(inputs, **options)


def by_asyncio(addresses: Any, inputs: Any, **options: Any) -> Embeddings:
    async def run() -> Embeddings:
        async with baton.AsyncClient(addresses, **AS_GIVEN) as client:
            return await client.embed(inputs, **options)

    return asyncio.run(run())


@pytest.fixture(params=[blocking, by_asyncio], ids=["blocking", "asyncio"])
def embed(request: pytest.FixtureRequest) -> Embed:
    made: Embed = request.param
    return made


def test_the_answer_has_a_vector_for_each_input(embed: Embed, router: StubRouter) -> None:
    found = embed(router.address, ["abc", [5, 6]], request_id="mine")
    assert found.vectors == ((3.0, 0.5), (2.0, 0.5))
    assert (found.request_id, found.model) == ("mine", "stub")
    assert (found.usage.prompt_tokens, found.usage.cached_tokens, found.usage.completion_tokens) == (5, 1, 0)
    assert found.timings.prefill_seconds == 0.25


GIVEN: list[tuple[Any, list[str | list[int]]]] = [
    ("abc", ["abc"]),
    ("", [""]),
    ([5, 6], [[5, 6]]),
    (["a"], ["a"]),
    (("a", "b"), ["a", "b"]),
    ([[5, 6], "a", []], [[5, 6], "a", []]),
    ([[]], [[]]),
    ([], []),
    (np.array([5, 6]), [[5, 6]]),
    (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
    ([np.array([5]), np.array([7, 8])], [[5], [7, 8]]),
    ([np.int64(5)], [[5]]),
]


@pytest.mark.parametrize(("given", "sent"), GIVEN, ids=[repr(given) for given, _ in GIVEN])
def test_inputs_may_be_texts_and_token_ids(
    given: Any, sent: list[str | list[int]], embed: Embed, router: StubRouter
) -> None:
    embed(router.address, given)
    (request,) = router.inference.embedded
    kinds = [one.WhichOneof("input") for one in request.input]
    assert kinds == ["text" if isinstance(one, str) else "token_ids" for one in sent]
    found = [
        one.text if one.WhichOneof("input") == "text" else list(one.token_ids.ids) for one in request.input
    ]
    assert found == sent


def test_options_are_sent_and_none_is_left_out(embed: Embed, router: StubRouter) -> None:
    options = {
        "model": "m",
        "dimensions": 4,
        "truncate_prompt_tokens": -1,
        "truncation_side": "right",
        "add_special_tokens": False,
        "priority": -1,
        "request_id": "mine",
    }
    embed(router.address, "a", timeout_seconds=30.0, **options)
    embed(router.address, "a", **dict.fromkeys(options))
    full, bare = router.inference.embedded
    assert {name: getattr(full, name) for name in options} == options
    assert [field.name for field, _ in bare.ListFields()] == ["input"]


@pytest.mark.parametrize(
    ("inputs", "options", "field"),
    [
        ([-1], {}, "input"),
        ([1.5], {}, "input"),
        (["a", 5], {}, "input"),
        ("\udc80", {}, "input"),
        (5, {}, "input"),
        ("a", {"dimensions": 2**40}, "dimensions"),
        ("a", {"truncation_side": 1}, "truncation_side"),
        ("a", {"dimension": 4}, "dimension"),
        ("a", {"input": ["b"]}, "input"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(
    inputs: Any, options: Any, field: str, embed: Embed
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        embed("127.0.0.1:1", inputs, **options)
    assert caught.value.field == field


def test_it_moves_on_to_a_router_that_answers(embed: Embed, router: StubRouter, other: StubRouter) -> None:
    assert embed(["127.0.0.1:1", router.address], "abc").vectors == ((3.0, 0.5),)
    router.inference.error = UnavailableError("no worker here")
    assert embed([router.address, other.address], "abc").vectors == ((3.0, 0.5),)
    with pytest.raises(UnavailableError):
        embed(["127.0.0.1:1", "127.0.0.1:2"], "abc", timeout_seconds=20)


@pytest.mark.parametrize("error", [AttemptsExhaustedError("gave up"), ContextLengthError("too long")])
def test_a_refusal_that_another_router_would_share_is_final(
    error: Any, embed: Embed, router: StubRouter, other: StubRouter
) -> None:
    router.inference.error = error
    with pytest.raises(type(error)):
        embed([router.address, other.address], "abc")
    assert len(router.inference.embedded) == 1 and not other.inference.embedded


def test_a_call_that_a_close_overtakes_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    client = baton.Client("127.0.0.1:1")
    before = client._stub()
    client.close()
    monkeypatch.setattr(client, "_stub", lambda: before)
    with pytest.raises(CancelledError, match="closed"):
        client.embed("a")
