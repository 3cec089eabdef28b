"""Requests that cannot fit the context are refused by their lengths, before they are parsed, rendered or tokenised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import Headers

from cluster.config.router import RouterConfig
from cluster.errors import (
    ContextLengthError,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
)
from cluster.security.keys import ANYONE, Caller, RateLimits
from router.frontends.field_names import renamed
from router.frontends.grpc.service import InferenceService
from router.frontends.http.anthropic.endpoint import _NAMES as _MESSAGES
from router.frontends.http.openai import generate
from router.frontends.http.openai.requests import ChatCompletionRequest, CompletionRequest, read_request
from router.frontends.http.responses.endpoint import _NAMES as _RESPONSES
from router.frontends.http.serving import Serving
from router.observe.traces import Arrival
from router.request.completion import Completion
from router.request.fields import read
from router.request.token_options import TokenOptions
from router.request.validator import OTHER_BYTES, TOKEN_ID_BYTES
from router.text.contents import Rendered
from router.text.conversation import Conversation
from tests.router.counting_gateway import CONTEXT, counting_gateway
from wire import inference_pb2 as pb

ARRIVAL = Arrival(lambda name: [])


@pytest.fixture
def gateway() -> Any:
    return counting_gateway()


async def test_a_text_that_cannot_fit_is_not_tokenised(gateway):
    longest = 3 * (CONTEXT - 1)
    for text in ("a" * longest, "é" * (longest // 2)):
        assert await gateway.encode(text) == [1]
    gateway.text.encoded.clear()
    for text in ("a" * (longest + 1), "é" * (longest // 2 + 1), "a" * 10**6):
        with pytest.raises(ContextLengthError) as caught:
            await gateway.encode(text)
        assert caught.value.field == "prompt" and not caught.value.retryable
    assert not gateway.text.encoded
    gateway.text.most_bytes = None
    assert await gateway.encode("a" * 10**6) == [1]


@pytest.mark.parametrize("most_bytes", [None, 3, 1000])
async def test_a_text_has_a_limit_of_its_own(most_bytes):
    """Where the context's is higher, or unknown, or does not count because the prompt is truncated."""
    gateway = counting_gateway(RouterConfig(model=Path("/models/m"), max_text_bytes=100))
    gateway.text.most_bytes = most_bytes
    for short in ("a" * 100, "é" * 50):
        assert await gateway.encode(short) == [1]
    gateway.text.encoded.clear()
    long: list[str | Rendered] = ["a" * 101, "é" * 51, Rendered("a" * 101, "")]
    for text in long:
        for truncated in (False, True):
            with pytest.raises(InvalidRequestError, match="max_text_bytes is 100") as caught:
                await gateway.encode(text, truncated=truncated)
            assert (caught.value.field, caught.value.limit) == ("prompt", "100")
    assert not gateway.text.encoded


@pytest.mark.parametrize("most_bytes", [None, 3])
@pytest.mark.parametrize("truncated", [False, True])
async def test_contents_have_the_limit_of_a_text_before_they_are_rendered(most_bytes, truncated):
    gateway = counting_gateway(RouterConfig(model=Path("/models/m"), max_text_bytes=200))
    gateway.text.most_bytes = most_bytes
    made: list[Any] = []

    async def encode(*given: Any, **named: Any) -> list[int]:
        return [1]

    gateway.encode = encode

    async def rendered(*lengths: int) -> None:
        messages = [{"role": "user", "content": "a" * length} for length in lengths]
        made.append(await gateway.converse(lambda: Conversation(messages), 1, truncated=truncated))

    await rendered(100, 100)
    with pytest.raises(InvalidRequestError) as caught:
        await rendered(100, 101)
    assert caught.value.field == "messages" and len(made) == 1
    assert isinstance(caught.value, ContextLengthError) is (most_bytes is not None and not truncated)


async def test_a_text_does_not_wait_for_its_thread_for_ever(gateway):
    async def never(*given: Any, **named: Any) -> Any:
        await asyncio.Event().wait()

    gateway.config = RouterConfig(model=Path("/models/m"), request_seconds=0.05)
    gateway.text.encode = gateway.text.chat = gateway.text.decode = gateway.text.lengths = never
    works: dict[str, Callable[[], Any]] = {
        "prompt": lambda: gateway.encode("a"),
        "messages": lambda: gateway.converse(lambda: Conversation([]), 1),
        "chat": lambda: gateway.converse(lambda: Conversation([]), 1, field="chat"),
        "tokens": lambda: gateway.decode([5], field="tokens"),
    }
    for field, work in works.items():
        with pytest.raises(DeadlineError) as caught:
            await work()
        assert (caught.value.field, caught.value.limit) == (field, "0.05 s")
        assert caught.value.message.startswith(f"{field}: it was not tokenised")
    for names, field in ((_RESPONSES, "input"), (_MESSAGES, "messages")):
        with pytest.raises(DeadlineError) as caught, renamed(names, ()):
            await gateway.lengths(list, 1)
        assert caught.value.field == field and caught.value.message.startswith(f"{field}: ")
        assert caught.value.limit == "0.05 s"


async def test_a_tenant_whose_requests_are_used_up_has_nothing_tokenised(gateway):
    class UsedUp:
        def check(self, tenant: str, limits: RateLimits, model: str) -> None:
            assert (tenant, limits.requests_per_minute, model) == ("few", 1, "")
            raise OverloadedError("used up", field="requests_per_minute")

    few = Caller(tenant="few", rate_limits=RateLimits(1, None))
    gateway.services = SimpleNamespace(quota=UsedUp())
    service = InferenceService(gateway)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    with pytest.raises(OverloadedError):
        await service._completion(pb.GenerateRequest(text="abc"), context, few)
    for kind, body in (("completion", {"prompt": "a"}), ("chat", {"messages": many(1, "a")})):
        request: Any = SimpleNamespace(scope={"baton.caller": few}, headers=Headers())
        with pytest.raises(OverloadedError):
            await getattr(generate.Generate(Serving(gateway)), f"_read_{kind}")(
                request, body, ARRIVAL, lambda prompts, repeated: None
            )
    assert not gateway.text.encoded and not gateway.text.rendered


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_truncation_is_checked_before_its_text_is_tokenised(gateway, kind):
    body = {"truncate_prompt_tokens": CONTEXT + 1, "prompt": "a"}
    if kind == "chat":
        body = {"truncate_prompt_tokens": 0, "messages": [{"role": "user", "content": "a"}]}
    request: Any = SimpleNamespace(scope={}, headers={})
    with pytest.raises(InvalidRequestError) as caught:
        await getattr(generate.Generate(Serving(gateway)), f"_read_{kind}")(
            request, body, ARRIVAL, lambda prompts, repeated: None
        )
    assert caught.value.field == "truncate_prompt_tokens"
    assert not gateway.text.encoded and not gateway.text.rendered


async def completions(gateway: Any, body: dict[str, Any]) -> list[Completion]:
    """Those that a request for completions becomes."""
    request: Any = SimpleNamespace(
        scope={}, headers=Headers(), watch=lambda watcher: None, unwatch=lambda: None
    )
    read = generate.Generate(Serving(gateway))._read_completion
    return (
        await read(request, {"max_tokens": 1, **body}, ARRIVAL, lambda prompts, repeated: None)
    ).completions


async def test_a_prompt_to_be_truncated_may_exceed_the_context(gateway):
    asked = {"prompt": "a" * (3 * CONTEXT + 1)}
    (made,) = await completions(gateway, {**asked, "truncate_prompt_tokens": 4})
    assert made.prompt_tokens == [1]
    with pytest.raises(ContextLengthError):
        await completions(gateway, asked)


def many(count: int, content: Any = "") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}] * count


async def test_more_messages_than_tokens_are_not_rendered(gateway):
    gateway.text.most_bytes = None
    service = InferenceService(gateway)
    context: Any = SimpleNamespace(time_remaining=lambda: None)

    def chat(count: int) -> pb.GenerateRequest:
        messages = [pb.ChatMessage(role="user", content="x")] * count
        return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))

    await service._completion(chat(CONTEXT - 1), context, ANYONE)
    limits = gateway.first.validator.limits
    read_request(ChatCompletionRequest, {"messages": many(CONTEXT - 1)}, limits)
    assert gateway.text.rendered == 1
    with pytest.raises(ContextLengthError):
        await service._completion(chat(CONTEXT), context, ANYONE)
    with pytest.raises(ContextLengthError):
        read_request(ChatCompletionRequest, {"messages": many(CONTEXT)}, limits)
    assert gateway.text.rendered == 1


async def test_held_tokens_beyond_the_context_are_refused_before_the_prompt_is_tokenised(gateway):
    service = InferenceService(gateway)
    context: Any = SimpleNamespace(time_remaining=lambda: None)
    for prompt in ({"text": "abc"}, {"token_ids": pb.TokenIds(ids=[1])}):
        request = pb.GenerateRequest(**prompt)
        request.resume_tokens.ids.extend([1] * 500_000)
        with pytest.raises(ContextLengthError) as caught:
            await service._completion(request, context, ANYONE)
        assert caught.value.field == "resume_tokens"
    assert not gateway.text.encoded


async def test_prompts_of_token_ids_are_measured_first(gateway):
    async def prompts(value: Any) -> list[list[int]]:
        return [made.prompt_tokens for made in await completions(gateway, {"prompt": value})]

    assert await prompts([1] * (CONTEXT - 1)) == [[1] * (CONTEXT - 1)]
    assert await prompts([[1] * (CONTEXT - 1)]) == [[1] * (CONTEXT - 1)]
    most = gateway.config.max_prompts
    for value, field in (
        ([1] * (most + 1), "prompt"),
        ([[1] * CONTEXT], "prompt"),
        (["a", [1] * CONTEXT], "prompt[1]"),
    ):
        with pytest.raises(ContextLengthError) as caught:
            await prompts(value)
        assert caught.value.field == field
    with pytest.raises(
        InvalidRequestError, match="max_prompts"
    ):  # also more texts than the context has tokens
        await prompts(["a"] * (most + 1))
    assert len(await prompts(["a"] * most)) == most
    # What is to be cut may be longer than the context.
    longer = {"prompt": [[1] * 2 * CONTEXT], "truncate_prompt_tokens": CONTEXT // 2}
    asked = read_request(CompletionRequest, longer, gateway.first.validator.limits)
    assert asked.prompt == longer["prompt"]
    assert len((await completions(gateway, longer))[0].prompt_tokens) == CONTEXT // 2


class Walked(Exception):
    """An element was read."""


class Unread(Sequence[Any]):
    """As many entries as wanted, which must not be read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise Walked


class UnreadObject(Mapping[str, Any]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Any:
        raise Walked

    __getitem__ = __iter__  # type: ignore[assignment]  # both raise


@pytest.mark.parametrize(
    ("field", "limit", "entries"),
    [
        ("stop", "max_stop_strings", Unread),
        ("stop_token_ids", "max_stop_token_ids", Unread),
        ("logit_bias", "max_logit_bias", UnreadObject),
        ("allowed_token_ids", "max_allowed_token_ids", Unread),
        ("bad_words", "max_bad_words", Unread),
    ],
)
def test_lists_of_options_are_counted_before_they_are_read(gateway, field, limit, entries):
    limits = gateway.first.validator.limits
    most = getattr(gateway.config, limit)
    with pytest.raises(Walked):
        read(TokenOptions, {field: entries(most)}, limits)
    for model, more in ((TokenOptions, {}), (CompletionRequest, {"prompt": "a"})):
        with pytest.raises(InvalidRequestError) as caught:
            read(model, {field: entries(most + 1), **more}, limits)
        assert (caught.value.field, caught.value.limit) == (field, str(most))


def test_a_message_longer_than_any_that_fits_is_refused_unparsed(gateway):
    most = max(3 * (CONTEXT - 1), TOKEN_ID_BYTES * CONTEXT) + OTHER_BYTES
    gateway.first.validator.check_message(most)
    with pytest.raises(ContextLengthError) as caught:
        gateway.first.validator.check_message(most + 1)
    assert caught.value.field == "message"
    gateway.text.most_bytes = None
    gateway.first.validator.check_message(most + 1)


async def test_a_text_that_is_far_too_long_is_not_copied(gateway):
    class Text_(str):
        def encode(self, *arguments: Any, **more: Any) -> bytes:
            raise AssertionError("a copy")

    with pytest.raises(ContextLengthError):
        await gateway.encode(Text_("a" * 10**6))
