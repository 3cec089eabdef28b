"""Checks of a request's spec at a worker: each wrong field by its name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cluster.errors import InvalidRequestError, UnsupportedFieldError
from cluster.protocol.block_hash import pack_tokens
from cluster.protocol.names import check_transfer_id
from wire import common_pb2
from worker.convert import sampling_from_wire
from worker.validate import SpecLimits, check_spec

LIMITS = SpecLimits("model", 100, 8, 50)


def spec(sampling: dict[str, Any] | None = None, **more: Any) -> common_pb2.GenerateSpec:
    given: dict[str, Any] = {
        "prompt_tokens": pack_tokens([1, 99]),
        "salt": bytes(16),
        "n": 1,
        "weight": 1.0,
        **more,
    }
    return common_pb2.GenerateSpec(
        sampling=common_pb2.SamplingParams(**{"max_tokens": 1, **(sampling or {})}), **given
    )


def test_valid_values_pass():
    check_spec(spec(), LIMITS)
    check_spec(spec(model_id="model", n=8, first_choice=3, priority=-5, tenant="acme"), LIMITS)
    check_spec(spec(adapter="0123456789abcdef" * 2), LIMITS)
    check_spec(spec(output_tokens=pack_tokens([5]), n=0, weight=0.0), LIMITS)
    check_spec(spec(grammar=common_pb2.Grammar(regex="x+")), LIMITS)
    check_spec(spec({"temperature": 2.0, "logit_bias": {99: -100.0}, "top_logprobs": 100}), LIMITS)
    check_spec(
        spec({"allowed_tokens": b"\0" * 12 + b"\x08", "bad_words": [pack_tokens([99, 0, 99])]}), LIMITS
    )
    check_transfer_id(bytes(16))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("model_id", {"model_id": "another"}),
        ("prompt_tokens", {"prompt_tokens": b""}),
        ("prompt_tokens", {"prompt_tokens": b"12345"}),
        ("prompt_tokens", {"prompt_tokens": pack_tokens([1, 100])}),
        ("prompt", {"prompt_tokens": pack_tokens([1] * 51)}),
        ("prompt", {"output_tokens": pack_tokens([1] * 49)}),
        ("model_id", {"model_id": "x" * 2000}),
        ("output_tokens", {"output_tokens": pack_tokens([2**32 - 1])}),
        ("output_tokens", {"output_tokens": pack_tokens([1]), "n": 2}),
        ("n", {"n": 9}),
        ("n", {"first_choice": 2**32 - 1}),
        ("salt", {"salt": b"short"}),
        ("adapter", {"adapter": "0" * 31}),
        ("adapter", {"adapter": "../" + "0" * 29}),
        ("tenant", {"tenant": "x" * 2000}),
        ("weight", {"weight": float("nan")}),
        ("weight", {"weight": -1.0}),
        ("grammar", {"grammar": common_pb2.Grammar()}),
        ("grammar", {"grammar": common_pb2.Grammar(regex="x" * 140_000)}),
        ("stop_token_ids", {"grammar": common_pb2.Grammar(regex="x"), "sampling": {"stop_token_ids": [5]}}),
    ],
)
def test_a_mistake_is_named(field, more):
    with pytest.raises(InvalidRequestError) as caught:
        check_spec(spec(**more), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 1.5),
        ("min_p", float("inf")),
        ("repetition_penalty", -1.0),
        ("presence_penalty", float("-inf")),
        ("frequency_penalty", float("nan")),
        ("max_tokens", 0),
        ("top_logprobs", 101),
        ("logit_bias", {100: 1.0}),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [1] * 101),
        ("logit_bias", {1: float("nan")}),
        ("allowed_tokens", b"\0" * 12 + b"\x10"),  # token 100
        ("allowed_tokens", b"\1" + b"\0" * 13),
        ("allowed_tokens", b"\0\0"),
        ("bad_words", [b""]),
        ("bad_words", [pack_tokens([1]), b"\1\0\0"]),
        ("bad_words", [pack_tokens([1, 100])]),
        ("bad_words", [pack_tokens([1])] * 101),
    ],
)
def test_how_to_sample_is_checked_too(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        check_spec(spec({field: value}), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize("length", [0, 15, 17, 1000])
def test_a_transfer_id_has_its_length(length):
    with pytest.raises(InvalidRequestError):
        check_transfer_id(bytes(length))


def test_a_worker_without_an_output_head_refuses_generation():
    base = dataclasses.replace(LIMITS, generates=False)
    check_spec(spec({"pooling": 1, "max_tokens": 1}), base)
    for sampling in ({"max_tokens": 1}, {"max_tokens": 1, "prompt_logprobs": True}):
        check_spec(spec(sampling), LIMITS)
        with pytest.raises(UnsupportedFieldError, match="base model") as caught:
            check_spec(spec(sampling), base)
        assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        ({"pooling": 1, "max_tokens": 2}, {}),
        ({"pooling": 1, "max_tokens": 1}, {"n": 2}),
        ({"pooling": 1, "max_tokens": 1, "prompt_logprobs": True}, {}),
        ({"pooling": 99, "max_tokens": 1}, {}),
    ],
)
def test_an_embedding_is_of_a_prompt_alone(sampling, more):
    check_spec(spec({"pooling": 1, "max_tokens": 1}), LIMITS)
    with pytest.raises(InvalidRequestError) as raised:
        check_spec(spec(sampling, **more), LIMITS)
    assert raised.value.field == "pooling"


def test_what_a_request_excludes_arrives_as_it_was_sent():
    sampling = {"allowed_tokens": b"\x05\x00\x80", "bad_words": [pack_tokens([5]), pack_tokens([1, 2, 99])]}
    params = sampling_from_wire(spec(sampling).sampling)
    words: Any = params.bad_words
    assert params.allowed_tokens == b"\x05\x00\x80" and list(map(tuple, words)) == [
        (5,),
        (1, 2, 99),
    ]
    assert sum(len(bytes(memoryview(word))) for word in words) == 16  # in 4 bytes each
    unset = sampling_from_wire(spec().sampling)
    assert (unset.allowed_tokens, unset.bad_words) == (b"", ())
