"""Conversion of Python values to requests of the wire; errors name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.client.types import GenerateOptions, Message, Prompt
from cluster.errors import InvalidRequestError
from wire import inference_pb2 as pb

_REPEATED = frozenset({"stop", "stop_token_ids"})


def generate_request(
    prompt: Prompt, options: GenerateOptions, *, model: str, request_id: str, explain: bool
) -> pb.GenerateRequest:
    """Build a request. Raises InvalidRequestError for values that protobuf cannot hold; the router checks the rest."""
    request = pb.GenerateRequest(model=model, request_id=request_id, explain=explain)
    _set_prompt(request, prompt)
    for name, value in options.items():
        _set_option(request.options, name, value)
    return request


def tokenize_request(prompt: str | Sequence[Message], *, model: str) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(model=model)
    with _naming("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_chat(prompt))
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    with _naming("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.CopyFrom(_chat(prompt))
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=[_token(item) for item in prompt]))


def _token(item: object) -> int:
    # index() accepts integers of numpy and torch, but no floats or strings
    return item.__index__()  # type: ignore[attr-defined, no-any-return]


def _chat(messages: Sequence[Any]) -> pb.ChatMessages:
    turns = [pb.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages]
    return pb.ChatMessages(messages=turns)


def _set_option(options: pb.GenerateOptions, name: str, value: Any) -> None:
    if name not in pb.GenerateOptions.DESCRIPTOR.fields_by_name:
        raise InvalidRequestError(f"unknown option {name!r}", field=name)
    with _naming(name):
        if name in _REPEATED:
            getattr(options, name).extend([value] if isinstance(value, str) else value)
        elif name == "logit_bias":
            options.logit_bias.update(value)
        elif value is not None:
            setattr(options, name, value)


class _naming:
    """Converts an error of protobuf about a value into InvalidRequestError with the field's name."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (TypeError, ValueError, KeyError, AttributeError)):
            raise InvalidRequestError(f"{self._field}: {error}", field=self._field) from error
