"""Request fields: how errors quote a client's values, and that markers, messages and models name the same fields."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from cluster.config.router import RouterConfig
from cluster.errors import InvalidRequestError, UnsupportedFieldError
from router.frontends.grpc.service import GrpcOptions
from router.frontends.http.openai.requests import ChatCompletionRequest, CompletionRequest, read_request
from router.frontends.http.openapi.document import request_schemas
from router.request.fields import RequestModel, filled, read, shown
from router.request.limits import MAX_SHOWN, FieldLimits
from router.request.options import DEFAULTS, GenerationOptions
from router.request.token_options import Exclusions, TokenOptions
from wire import common_pb2, inference_pb2

TEXT: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64)
LIMITS = FieldLimits.of(RouterConfig(model=Path("/models/m"), secret="x" * 16), TEXT)
LONG = "x" * 10**6


def refused(body: dict[str, Any]) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(CompletionRequest, {"prompt": "a", **body}, LIMITS)
    return caught.value


@pytest.mark.parametrize("value", [LONG, [LONG] * 100, {LONG: LONG}, [[[[LONG]]]], 10**300])
def test_a_value_is_shown_in_few_characters(value: Any) -> None:
    assert len(shown(value)) <= MAX_SHOWN == 80
    for field in (
        "temperature",
        "seed",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "stream",
        "tools",
        "priority",
    ):
        assert len(refused({field: value}).message) < 200


def test_a_model_s_name_is_shown_in_few_characters() -> None:
    assert len(refused({"model": LONG}).message) < 200


def test_unsupported_fields_are_named_before_wrong_ones() -> None:
    error = refused({"temperature": "hot", "tools": [1]})
    assert isinstance(error, UnsupportedFieldError) and error.field == "tools"
    error = refused({"temperature": "hot", "tools": [1], "top_a": 1})
    assert isinstance(error, UnsupportedFieldError) and error.field == "top_a"


def test_an_error_without_a_text_of_its_own_is_a_refusal_all_the_same() -> None:
    class Odd(RequestModel):
        value: complex

    with pytest.raises(InvalidRequestError) as caught:
        read(Odd, {"value": "x"}, LIMITS, "part")
    assert (caught.value.field, caught.value.message) == ("part.value", "part.value: is not valid")


def test_every_entry_of_a_list_counts() -> None:
    for field, value in (
        ("stop", ["a", 1]),
        ("stop_token_ids", [1, "a"]),
        ("logit_bias", {"1": 1.0, "2": "a"}),
        ("logit_bias", {"1": 1.0, "a": 1.0}),
        ("allowed_token_ids", [1, "a"]),
        ("bad_words", ["a", 1]),
    ):
        assert refused({field: value}).field == field


def test_schemas_have_no_unfilled_limits() -> None:
    schemas = request_schemas(LIMITS)
    assert "$limit" not in str(schemas)
    assert schemas["ChatCompletionRequest"]["properties"]["n"]["maximum"] == LIMITS.settings.max_choices
    assert filled({"a": [{"$limit": "last_token"}]}, LIMITS) == {"a": [99]}
    TypeAdapter(dict[str, dict[str, Any]]).validate_python(schemas)


def test_the_message_and_the_model_have_the_same_options() -> None:
    options = {field.name for field in inference_pb2.GenerateOptions.DESCRIPTOR.fields}
    own = {"grammar", "prompt_logprobs"}
    assert options == set(GrpcOptions.model_fields) == {*TokenOptions.model_fields, *own}


def test_workers_get_every_option_that_concerns_them() -> None:
    sampling = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    routers_own = {"n", "stop", "include_stop_text", "priority"}
    of_endpoints = {"top_logprobs", "prompt_logprobs", "prompt_top_logprobs"}  # names differ
    of_endpoints |= {"pooling"}  # chosen by /v1/embeddings
    of_endpoints |= {"allowed_tokens", "bad_words"}  # as workers have them: router/request/token_options.py
    assert sampling - of_endpoints == set(GenerationOptions.model_fields) - routers_own
    assert {"allowed_tokens", "bad_words"} == {one.name for one in dataclasses.fields(Exclusions)}
    assert set(DEFAULTS) < sampling


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
def test_the_stop_text_option_has_its_own_name_over_http(model: Any) -> None:
    assert "include_stop_str_in_output" in model.names and "include_stop_text" not in model.names


def test_a_wrong_value_is_shown_without_sorting_its_members():
    """Sixty thousand took 25 ms of the event loop."""
    assert shown({"b": 1, "a": {"c": {}}}) == "{'b': 1, 'a': {'c': {}}}"
    assert shown({str(number): 1 for number in (9, 8, 7, 6, 5)}) == "{'9': 1, '8': 1, '7': 1, '6': 1, ...}"
    deep: dict[str, Any] = {}
    for _ in range(9):
        deep = {"a": deep}
    assert shown(deep).count("'a'") == 6 and "{...}" in shown(deep)
