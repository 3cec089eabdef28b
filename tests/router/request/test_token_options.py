"""`allowed_token_ids` and `bad_words`: which requests may have them, their bounds, and what workers get."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError, UnsupportedFieldError
from cluster.protocol.block_hash import pack_tokens
from router.frontends.exclusions import read_exclusions
from router.frontends.grpc.service import GrpcOptions
from router.frontends.http.anthropic.request import MessagesRequest
from router.frontends.http.openai.requests import ChatCompletionRequest, CompletionRequest, read_request
from router.frontends.http.responses.request import ResponseRequest
from router.request.fields import read
from router.request.limits import FieldLimits
from router.request.options import GenerationOptions
from router.request.token_options import NO_EXCLUSIONS, Exclusions, TokenOptions, exclusions_of
from router.request.validator import Envelope
from tests.router.request.validators import Long, validator

TEXT: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64)
CONFIG = RouterConfig(
    model=Path("/models/m"),
    secret="x" * 16,
    max_allowed_token_ids=3,
    max_bad_words=2,
    max_bad_word_characters=4,
)
LIMITS = FieldLimits.of(CONFIG, TEXT)


@pytest.mark.parametrize(
    ("given", "refused", "limit"),
    [
        ({"allowed_token_ids": [0, 5, 99]}, {"allowed_token_ids": [0, 5, 6, 99]}, "3"),
        ({"allowed_token_ids": None}, {"allowed_token_ids": []}, ""),
        ({"allowed_token_ids": [5]}, {"allowed_token_ids": [True]}, ""),
        ({"allowed_token_ids": [5]}, {"allowed_token_ids": 5}, ""),
        ({"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}, "2"),
        ({"bad_words": ["abcd"]}, {"bad_words": ["abcde"]}, "4"),
        ({"bad_words": []}, {"bad_words": [""]}, "4"),
        ({"bad_words": [" a "]}, {"bad_words": ["a", " \n"]}, ""),
        ({"bad_words": None}, {"bad_words": "a"}, ""),
    ],
)
def test_a_bound_is_named_and_what_is_within_it_is_accepted(
    given: dict[str, Any], refused: dict[str, Any], limit: str
) -> None:
    (field,) = given
    for model in (CompletionRequest, ChatCompletionRequest):
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        body = {name: body[name] for name in body if name in model.names}
        read_request(model, {**body, **given}, LIMITS)
        with pytest.raises(InvalidRequestError, match=field) as caught:
            read_request(model, {**body, **refused}, LIMITS)
        assert (caught.value.field, caught.value.limit) == (field, limit)
        assert not limit or "(max_" in caught.value.message


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_lists_are_counted_before_anything_reads_them(field: str) -> None:
    with pytest.raises(InvalidRequestError, match="at most") as caught:
        read(GrpcOptions, {field: Long(10**6)}, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(("model", "prompt"), [(ResponseRequest, "input"), (MessagesRequest, "messages")])
@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
def test_endpoints_without_them_refuse_them_by_name(model: Any, prompt: str, field: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        read_request(model, {prompt: "a", field: [1]}, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("allowed", "words", "field"),
    [([0, 100], [], "allowed_token_ids"), ([-1], [], "allowed_token_ids"), ([2**70], [], "allowed_token_ids"),
     (None, [[1], [5, 100]], "bad_words")],
)  # fmt: skip
def test_ids_outside_the_vocabulary_are_refused(
    allowed: list[int] | None, words: list[list[int]], field: str
) -> None:
    with pytest.raises(InvalidRequestError, match="0 … 99") as caught:
        exclusions_of(allowed, words, 99)
    assert (caught.value.field, caught.value.limit) == (field, "99")


@pytest.mark.parametrize("count", [1, 2, 50, 100])
def test_workers_get_a_bit_for_each_allowed_token(count: int) -> None:
    ids = random.Random(count).sample(range(100), count)
    made = exclusions_of([*ids, ids[0]], [], 99).allowed_tokens
    assert {number for number in range(8 * len(made)) if made[number // 8] >> number % 8 & 1} == set(ids)
    assert len(made) == max(ids) // 8 + 1


def test_requests_carry_them_and_those_for_a_prompt_alone_do_not() -> None:
    by, exclusions = validator(), Exclusions(b"\x05", [pack_tokens([1, 2])])
    options = read(TokenOptions, {"max_tokens": 3}, by.limits)
    made = by.completion([1, 2], options, Envelope(exclusions=exclusions))
    assert (made.sampling.allowed_tokens, list(made.sampling.bad_words)) == (b"\x05", [pack_tokens([1, 2])])
    body = {"prompt": [1, 2], "echo": True, "max_tokens": 0}
    alone = by.completion(
        [1, 2], read_request(CompletionRequest, body, by.limits), Envelope(exclusions=exclusions)
    )
    assert alone.prompt_only and not alone.sampling.allowed_tokens and not alone.sampling.bad_words


@pytest.mark.parametrize("count", [4, 5])
async def test_a_word_has_no_more_tokens_than_it_may_have_characters(count: int) -> None:
    """Else a short body of rare characters would be megabytes for the workers of each of its prompts."""

    async def as_it_is(work: Any, field: str) -> Any:
        return await work

    async def words(given: Any, *, tenant: str) -> list[list[int]]:
        return [[1], [2] * count]

    gateway: Any = SimpleNamespace(in_time=as_it_is)
    model: Any = SimpleNamespace(
        text=SimpleNamespace(words=words), validator=validator(max_bad_word_characters=4)
    )
    options = read(TokenOptions, {"bad_words": ["a", "bcde"]}, LIMITS)
    if count == 4:
        assert len((await read_exclusions(gateway, model, options, "")).bad_words) == 2
        return
    with pytest.raises(InvalidRequestError, match="max_bad_word_characters") as caught:
        await read_exclusions(gateway, model, options, "")
    assert (caught.value.field, caught.value.limit) == ("bad_words", "4")


async def test_nothing_is_read_where_nothing_is_excluded() -> None:
    options = read(GenerationOptions, {}, LIMITS)
    nothing: Any = None
    assert await read_exclusions(nothing, nothing, options, "") is NO_EXCLUSIONS
    empty = read(TokenOptions, {"bad_words": []}, LIMITS)
    assert await read_exclusions(nothing, nothing, empty, "") is NO_EXCLUSIONS
