"""A field that is null counts as one that is missing, in everything that clients' JSON is read into."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.router import RouterConfig
from router.frontends.http.openai.requests import ChatCompletionRequest, read_request
from router.frontends.http.openapi import document
from router.frontends.http.responses.input_items import read_items
from router.frontends.http.responses.request import ResponseRequest
from router.request.fields import RequestModel
from router.request.grammar.requested import ANY_OBJECT
from router.request.limits import FieldLimits
from router.request.messages import read_messages

TEXT: Any = SimpleNamespace(vocab_size=100, max_position_embeddings=64)
LIMITS = FieldLimits.of(RouterConfig(model="m", secret="x" * 16), TEXT)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
FROM_JSON = ("router.frontends.http.", "router.request.messages")


def models(base: type[RequestModel] = RequestModel) -> Iterator[type[RequestModel]]:
    for one in base.__subclasses__():
        if one.__module__.startswith(FROM_JSON) and not inspect.isabstract(one):
            yield one
        yield from models(one)


def optional_fields() -> list[tuple[type[RequestModel], str]]:
    assert document, "imports the models of all endpoints"
    return [
        (model, field.alias or name)
        for model in dict.fromkeys(models())
        for name, field in model.model_fields.items()
        if not field.is_required()
    ]


def test_there_are_such_fields_of_every_endpoint() -> None:
    found = {model.__name__ for model, _ in optional_fields()}
    assert found >= {
        "ChatCompletionRequest",
        "ResponseRequest",
        "MessagesRequest",
        "EmbeddingRequest",
        "ToolCall",
    }


def refused(model: type[RequestModel], given: dict[str, Any]) -> set[str | int]:
    """The fields that are wrong, or missing."""
    try:
        model.model_validate(given, context=LIMITS)
    except ValidationError as error:
        return {one["loc"][0] for one in error.errors()}
    return set()


@pytest.mark.parametrize(
    ("model", "name"), optional_fields(), ids=lambda one: one if isinstance(one, str) else one.__name__
)
def test_an_optional_field_may_be_null(model: type[RequestModel], name: str) -> None:
    assert name not in refused(model, {name: None})


@pytest.mark.parametrize("more", [{"arguments": None}, {"arguments": ""}, {}])
def test_a_call_without_arguments_has_an_empty_object(more: dict[str, Any]) -> None:
    call = {"id": "c1", "type": None, "function": {"name": "f", **more}}
    (message,) = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], LIMITS)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_a_call_of_an_earlier_response_may_have_none_either() -> None:
    item = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": None}
    (message,) = read_items([item], None, LIMITS)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_formats_may_be_written_out_with_what_they_do_not_have() -> None:
    """As vLLM's own clients do: its model of a format has `json_schema` for all types."""
    schema = {"name": "a", "schema": {"type": "object"}, "strict": None, "more": None}
    for given, grammar in (
        ({"type": "text", "json_schema": None}, None),
        ({"type": "json_object", "json_schema": None}, ANY_OBJECT),
        ({"type": "json_schema", "json_schema": schema, "more": None}, ANY_OBJECT),
    ):
        asked = read_request(ChatCompletionRequest, {**CHAT, "response_format": given}, LIMITS).asked_grammar
        assert (None if asked is None else asked.spec) == grammar
    text = {"format": {"type": "json_object", "name": None}}
    made = read_request(ResponseRequest, {"input": "hi", "text": text}, LIMITS).asked_grammar
    assert made is not None and made.spec == ANY_OBJECT
