"""Requests that cannot fit the context are refused by length, before they are parsed, rendered or tokenised; long ones are
rendered and tokenised on threads."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.config.router import RequestLimits, RouterConfig
from cluster.errors import (
    ContextLengthError,
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    OverloadedError,
    RequestTooLargeError,
)
from cluster.security.keys import ANYONE, Caller, RateLimits
from router.admission.limits import ByteBudget
from router.admission.low_priority import LowPriority
from router.frontends.grpc.service import InferenceService
from router.frontends.http import generate
from router.frontends.http.body import read_json
from router.frontends.http.json_scan import JsonScan
from router.frontends.http.messages import chat_size
from router.frontends.http.requests import ChatCompletionRequest, CompletionRequest, read_request
from router.gateway import RequestGateway
from router.observe.traces.arrival import Arrival
from router.request.completion import Completion
from router.request.fields import read
from router.request.options import GenerationOptions
from router.request.validator import OTHER_BYTES, TOKEN_ID_BYTES, Validator
from router.text.bound import most_bytes
from router.text.contents import Rendered
from router.text.tokenizer import INLINE_CHAT_CHARACTERS, LONG_CHARACTERS, MESSAGE_CHARACTERS, ModelText
from wire import inference_pb2 as pb

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    pieces = [*ALPHABET, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback(*pieces: str) -> Tokenizer:
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", *pieces]
    made = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(vocab)},
            merges=[("▁", "a")] if "▁a" in pieces else [],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def with_part(made: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(made, name, part)
    return made


KNOWN = {
    "demo": lambda: Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    "bytes": byte_level,
    "merged": lambda: byte_level(("a", "a"), ("aa", "aa"), ("Ġ", "a")),
    "composed": lambda: with_part(byte_level(("Î", "Ĳ")), normalizer=normalizers.NFC()),
    "fallback": lambda: byte_fallback("▁a"),
}


@pytest.mark.parametrize("name", KNOWN)
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30) | st.text("a \u0390\u1fbe\u0308\u0301\u1fef\U0001f600", max_size=30))
def test_no_token_stands_for_more_than_the_bound_says(name, text):
    tokenizer = KNOWN[name]()
    most = most_bytes(tokenizer)
    assert most is not None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= most * len(ids)


def test_the_bound_is_the_longest_token():
    assert most_bytes(byte_level()) == 1
    assert most_bytes(byte_level(("a", "a"), ("aa", "aa"))) == 4
    made = byte_level()
    made.add_special_tokens(["<|é|>"])
    assert most_bytes(made) == 6
    assert most_bytes(byte_fallback("▁a")) == 6


def words() -> Tokenizer:
    return with_part(
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
        pre_tokenizer=pre_tokenizers.WhitespaceSplit(),
    )


def swallowing() -> Tokenizer:
    made = byte_level()
    made.add_tokens([AddedToken("<m>", lstrip=True)])
    return made


def truncating() -> Tokenizer:
    made = byte_level()
    made.enable_truncation(4)
    return made


UNBOUNDED = {
    "a word each": words,
    "swallows white space": swallowing,
    "cuts": truncating,
    "strips": lambda: with_part(byte_level(), normalizer=normalizers.Strip()),
    "drops": lambda: with_part(byte_level(), normalizer=normalizers.Replace("xx", "")),
    "leaves out what is between": lambda: with_part(
        byte_level(),
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "one for all it does not know": lambda: Tokenizer(
        models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True)
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_others_have_no_bound(name):
    assert most_bytes(UNBOUNDED[name]()) is None


# --- what is refused ---------------------------------------------------------------------------------------------------


class Front_(SimpleNamespace):
    encode, render, preparing = RequestGateway.encode, RequestGateway.render, RequestGateway.preparing
    check_allowed, _in_time = RequestGateway.check_allowed, RequestGateway._in_time
    _rate_limits = RequestGateway._rate_limits


CONTEXT = 64
ARRIVAL = Arrival(lambda name: [])


class Text:
    """A byte-level tokenizer that counts its calls."""

    vocab_size, max_position_embeddings, generation = 300, CONTEXT, {}
    most_bytes: int | None = 3

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.rendered = 0

    async def encode(self, text: str, *, special: bool = True, tenant: str = "") -> list[int]:
        self.encoded.append(text)
        return [1]

    async def chat(
        self, read: Any, characters: int, reasoning_effort: str | None = None, *, tenant: str = ""
    ) -> str:
        self.rendered += 1
        return "".join(message["content"] for message in read())


@pytest.fixture
def gateway() -> Any:
    text: Any = Text()
    config = RouterConfig(model=Path("/models/m"))
    return Front_(text=text, config=config, validator=Validator(config, text))


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
async def test_a_text_has_a_limit_of_its_own(gateway, most_bytes):
    """Where the context's is higher, or unknown, or does not count because the prompt is truncated."""
    gateway.text.most_bytes = most_bytes
    gateway.validator = Validator(RouterConfig(model=Path("/models/m"), max_text_bytes=100), gateway.text)
    for text in ("a" * 100, "é" * 50):
        assert await gateway.encode(text) == [1]
    gateway.text.encoded.clear()
    for text in ("a" * 101, "é" * 51, Rendered("a" * 101, "")):
        for truncated in (False, True):
            with pytest.raises(InvalidRequestError, match="max_text_bytes is 100") as caught:
                await gateway.encode(text, truncated=truncated)
            assert (caught.value.field, caught.value.limit) == ("prompt", "100")
    assert not gateway.text.encoded


@pytest.mark.parametrize("most_bytes", [None, 3])
@pytest.mark.parametrize("truncated", [False, True])
async def test_contents_have_the_limit_of_a_text_before_they_are_rendered(gateway, most_bytes, truncated):
    gateway.text.most_bytes = most_bytes
    gateway.validator = Validator(RouterConfig(model=Path("/models/m"), max_text_bytes=200), gateway.text)
    made: list[Any] = []

    async def rendered(*lengths: int) -> None:
        messages = [{"role": "user", "content": "a" * length} for length in lengths]
        made.append(await gateway.render(lambda: messages, 1, truncated=truncated))

    await rendered(100, 100)
    with pytest.raises(InvalidRequestError) as caught:
        await rendered(100, 101)
    assert caught.value.field == "prompt" and len(made) == 1
    assert isinstance(caught.value, ContextLengthError) is (most_bytes is not None and not truncated)


async def test_a_text_does_not_wait_for_its_thread_for_ever(gateway):
    async def never(*given: Any, **named: Any) -> Any:
        await asyncio.Event().wait()

    gateway.config = RouterConfig(model=Path("/models/m"), request_seconds=0.05)
    gateway.text.encode = gateway.text.chat = never
    for work in (gateway.encode("a"), gateway.render(list, 1)):
        with pytest.raises(DeadlineError) as caught:
            await work
        assert (caught.value.field, caught.value.limit) == ("prompt", "0.05 s")


async def test_a_tenant_whose_requests_are_used_up_has_nothing_tokenised(gateway):
    class UsedUp:
        def check(self, tenant: str, limits: RateLimits) -> None:
            assert (tenant, limits.requests_per_minute) == ("few", 1)
            raise OverloadedError("used up", field="requests_per_minute")

    few = Caller(tenant="few", rate_limits=RateLimits(1, None))
    gateway.services = SimpleNamespace(quota=UsedUp())
    service, context = InferenceService(gateway), SimpleNamespace(time_remaining=lambda: None)
    with pytest.raises(OverloadedError):
        await service._completion(pb.GenerateRequest(text="abc"), context, few)
    for kind, body in (("completion", {"prompt": "a"}), ("chat", {"messages": many(1, "a")})):
        request: Any = SimpleNamespace(scope={"baton.caller": few}, headers=Headers())
        with pytest.raises(OverloadedError):
            await getattr(generate.Generate(gateway), f"_read_{kind}")(
                request, body, ARRIVAL, lambda prompts: None
            )
    assert not gateway.text.encoded and not gateway.text.rendered
    # One that another router may have charged is charged once it is tokenised, if its ticket is not valid.
    await service._completion(pb.GenerateRequest(text="abc", resume_ticket=b"x"), context, few)
    assert gateway.text.encoded == ["abc"]


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_truncation_is_checked_before_its_text_is_tokenised(gateway, kind):
    body = {"truncate_prompt_tokens": CONTEXT + 1, "prompt": "a"}
    if kind == "chat":
        body = {"truncate_prompt_tokens": 0, "messages": [{"role": "user", "content": "a"}]}
    request: Any = SimpleNamespace(scope={}, headers={})
    with pytest.raises(InvalidRequestError) as caught:
        await getattr(generate.Generate(gateway), f"_read_{kind}")(
            request, body, ARRIVAL, lambda prompts: None
        )
    assert caught.value.field == "truncate_prompt_tokens"
    assert not gateway.text.encoded and not gateway.text.rendered


async def completions(gateway: Any, body: dict[str, Any]) -> list[Completion]:
    """Those that a request for completions becomes."""
    request: Any = SimpleNamespace(scope={}, headers=Headers())
    read = generate.Generate(gateway)._read_completion
    return (await read(request, {"max_tokens": 1, **body}, ARRIVAL, lambda prompts: None)).completions


async def test_what_is_truncated_may_exceed_the_context(gateway):
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
    limits = gateway.validator.limits
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
    for value in ([1] * (most + 1), [[1] * CONTEXT], ["a"] * (most + 1)):
        with pytest.raises(ContextLengthError):
            await prompts(value)
    assert len(await prompts(["a"] * most)) == most
    # What is to be cut may be longer than the context.
    longer = {"prompt": [[1] * 2 * CONTEXT], "truncate_prompt_tokens": CONTEXT // 2}
    asked = read_request(CompletionRequest, longer, gateway.validator.limits)
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

    __getitem__ = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("field", "limit", "entries"),
    [
        ("stop", "max_stop_strings", Unread),
        ("stop_token_ids", "max_stop_token_ids", Unread),
        ("logit_bias", "max_logit_bias", UnreadObject),
    ],
)
def test_lists_of_options_are_counted_before_they_are_read(gateway, field, limit, entries):
    limits = gateway.validator.limits
    most = getattr(gateway.config, limit)
    with pytest.raises(Walked):
        read(GenerationOptions, {field: entries(most)}, limits)
    for model, more in ((GenerationOptions, {}), (CompletionRequest, {"prompt": "a"})):
        with pytest.raises(InvalidRequestError) as caught:
            read(model, {field: entries(most + 1), **more}, limits)
        assert (caught.value.field, caught.value.limit) == (field, str(most))


# --- what is done beside the loop --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text():
    made = ModelText(DEMO)
    yield made
    made.close()


async def test_long_conversations_are_rendered_on_a_thread(text):
    threads: list[str] = []

    def read() -> list[dict[str, str]]:
        threads.append(threading.current_thread().name)
        return [{"role": "user", "content": "x"}]

    short = await text.chat(read, INLINE_CHAT_CHARACTERS)
    assert threads == [threading.current_thread().name]
    assert await text.chat(read, INLINE_CHAT_CHARACTERS + 1) == short
    assert threads[1].startswith("render")


async def test_long_texts_keep_no_others_waiting(text, monkeypatch):
    """A text that nothing bounds (it is to be cut, or only counted) may take seconds."""
    go_on = threading.Event()

    def encode(given: str, special: bool) -> list[int]:
        if len(given) > LONG_CHARACTERS:
            assert go_on.wait(30)
        return [len(given)]

    monkeypatch.setattr(text, "_encode", encode)
    long = [asyncio.create_task(text.encode("a" * (LONG_CHARACTERS + 1))) for _ in range(3)]
    await asyncio.sleep(0)  # they are before it
    try:
        async with asyncio.timeout(20):
            assert await text.encode("a" * LONG_CHARACTERS) == [LONG_CHARACTERS]
    finally:
        go_on.set()
    assert await asyncio.gather(*long) == 3 * [[LONG_CHARACTERS + 1]]


async def test_errors_in_a_long_conversation_are_reported(text):
    def read() -> list[dict[str, str]]:
        raise InvalidRequestError("messages[3]: must be an object", field="messages[3]")

    with pytest.raises(InvalidRequestError) as caught:
        await text.chat(read, INLINE_CHAT_CHARACTERS + 1)
    assert caught.value.field == "messages[3]"


def test_what_a_conversation_costs():
    size = chat_size
    assert size(many(2, "abc")) == 2 * (MESSAGE_CHARACTERS + 3)
    assert size(many(1, [{"type": "text", "text": "abc"}] * 2)) == MESSAGE_CHARACTERS * 3 + 6
    few = INLINE_CHAT_CHARACTERS // MESSAGE_CHARACTERS
    for long in (many(few + 1), many(1, "x" * INLINE_CHAT_CHARACTERS), many(1, [{}] * few)):
        assert size(long) > INLINE_CHAT_CHARACTERS
    for odd in (
        [None],
        [{}],
        [{"content": 3}],
        [{"content": [3]}],
        [{"content": [{"text": 3}]}],
    ):
        assert size(odd) <= 2 * MESSAGE_CHARACTERS, "read_messages says what is wrong"


# --- depth and elements ------------------------------------------------------------------------------------------------

ANY = 1 << 30


def received(left: list[bytes], depth: int = ANY, elements: int = ANY, size: int = 1 << 24) -> dict[str, Any]:
    """A body that arrives in these pieces; those that were not read stay in the list."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    held = ByteBudget(ANY, ANY, lambda tenant: None).hold("")
    most = {"max_body_bytes": size, "max_json_depth": depth, "max_json_elements": elements}
    limits = RequestLimits().model_copy(update=most)
    return asyncio.run(
        read_json(Request({"type": "http", "headers": []}, receive), limits, held, LowPriority())
    )


def pieces_of(raw: bytes, size: int) -> list[bytes]:
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def body(value: Any, depth: int = ANY, elements: int = ANY) -> dict[str, Any]:
    return received([orjson.dumps(value)], depth, elements)


VALUES = st.recursive(
    st.integers(0, 9) | st.text('[{]}",:\\', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=3),
    max_leaves=20,
)
OBJECTS = st.dictionaries(st.text("ab", max_size=1), VALUES, max_size=3)


def inner_of(one: Any) -> list[Any]:
    return list(one.values()) if isinstance(one, dict) else one if isinstance(one, list) else []


def deep(one: Any) -> int:
    return int(isinstance(one, list | dict)) + max(map(deep, inner_of(one)), default=0)


def cost(one: Any) -> int:
    inner = inner_of(one)
    members = 16 * len(inner) if isinstance(one, dict) else 0
    own = 16 * isinstance(one, list | dict) + members + max(0, len(inner) - 1)
    return own + sum(map(cost, inner))


@given(value=OBJECTS, limit=st.integers(1, 6))
def test_a_body_nests_as_deep_as_it_may_and_no_deeper(value, limit):
    if deep(value) <= limit:
        assert body(value, limit) == value
    else:
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            body(value, limit)


@given(value=OBJECTS, change=st.integers(-1, 1))
def test_a_body_has_as_many_elements_as_it_may_and_no_more(value, change):
    limit = cost(value) + change
    if change >= 0:
        assert body(value, elements=limit) == value
    else:
        with pytest.raises(InvalidRequestError, match="elements") as caught:
            body(value, elements=limit)
        assert (caught.value.field, caught.value.limit) == ("body", str(limit))


@given(value=OBJECTS, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_pieces_are_counted_as_the_whole(value, cuts):
    raw = orjson.dumps(value)
    scan, begins = JsonScan(), 0
    for end in [*sorted(cuts), len(raw)]:
        scan.read(raw[begins:end])
        begins = max(begins, end)
    assert (scan.depth, scan.elements) == (deep(value), cost(value))
    assert scan.seen == len(raw)


@pytest.mark.parametrize("one", [[], {}, [[1]], "["])
def test_wide_bodies_are_not_walked_over(one):
    """A message may hold many lists, and the loop serves others meanwhile."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        body({"x": 20_000 * [one]}, 8)
    finally:
        sys.setprofile(before)
    assert calls < 5_000


def test_too_much_is_refused_before_all_of_it_has_come():
    """And before the parser sees any of it: what comes here is not JSON."""
    for piece in (b"[", b"{", b"[],", b'"":', b"1,"):
        left = pieces_of((1 << 22) // len(piece) * piece, 1 << 16)
        with pytest.raises(InvalidRequestError, match=r"nested|elements"):
            received(left, 32, 1 << 20)
        assert len(left) > 20


def test_large_bodies_within_the_limits_are_read():
    value = {"a": 200_000 * [1], "b": '["\\' * 200_000, "c": {str(i): [i] for i in range(10_000)}}
    assert received(pieces_of(orjson.dumps(value), 70_001), 3, 1 << 20) == value


def test_a_body_has_as_many_bytes_as_it_may_and_no_more():
    raw = orjson.dumps({"a": "b" * 100})
    assert received(pieces_of(raw, 10), size=len(raw)) == {"a": "b" * 100}
    left = pieces_of(raw + 100 * b" ", 10)
    with pytest.raises(RequestTooLargeError):
        received(left, size=len(raw) - 1)
    assert len(left) > 5, "nor is the rest read"


async def test_the_refusal_of_a_router_that_leaves_comes_after_the_body(gateway):
    """It closes the connection, which would be reset under the answer if bytes were unread."""
    left = [b"x" * 1000] * 5

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(), "more_body": bool(left)}

    @contextlib.contextmanager
    def place(caller: Any, connection: str) -> Any:
        raise DrainingError("this router is leaving")
        yield

    gateway.place = place
    gateway.low_priority = LowPriority()
    with pytest.raises(DrainingError):
        await generate.Generate(gateway).completion(Request({"type": "http", "headers": []}, receive))
    assert not left


def test_a_message_longer_than_any_that_fits_is_refused_unparsed(gateway):
    most = max(3 * (CONTEXT - 1), TOKEN_ID_BYTES * CONTEXT) + OTHER_BYTES
    gateway.validator.check_message(most)
    with pytest.raises(ContextLengthError) as caught:
        gateway.validator.check_message(most + 1)
    assert caught.value.field == "message"
    gateway.text.most_bytes = None
    gateway.validator.check_message(most + 1)


async def test_a_text_that_is_far_too_long_is_not_copied(gateway):
    class Text_(str):
        def encode(self, *arguments: Any, **more: Any) -> bytes:
            raise AssertionError("a copy")

    with pytest.raises(ContextLengthError):
        await gateway.encode(Text_("a" * 10**6))
