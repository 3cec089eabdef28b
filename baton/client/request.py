"""Conversion of Python values to requests of the wire; errors name the field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from baton.client.types import Message, Prompt, RequestOptions
from cluster.errors import InvalidRequestError
from wire import common_pb2
from wire import inference_pb2 as pb

_REPEATED = frozenset({"stop", "stop_token_ids", "allowed_token_ids", "bad_words"})
_RULES = tuple(field.name for field in common_pb2.Grammar.DESCRIPTOR.fields)
_OF_CHAT = frozenset(
    {
        *("tools", "tool_choice", "parallel_tool_calls", "template_kwargs", "reasoning_effort"),
        *("add_generation_prompt", "continue_final_message"),
    }
)
_OF_REQUEST = frozenset({"model", "request_id", "explain"})


def generate_request(prompt: Prompt, options: RequestOptions) -> pb.GenerateRequest:
    """Build a request; an option that is None is left out. Raises InvalidRequestError for values that protobuf cannot
    hold; the router checks the rest."""
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name in _OF_CHAT:
            _set_chat_option(request, name, value)
        elif name != "timeout_seconds":
            _set_option(request if name in _OF_REQUEST else request.options, name, value)
    return request


def tokenize_request(prompt: str | Sequence[Message], *, model: str) -> pb.TokenizeRequest:
    request = pb.TokenizeRequest(model=model)
    with naming("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_chat(prompt))
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    with naming("prompt"):
        if isinstance(prompt, str):
            request.text = prompt
        elif prompt and isinstance(prompt[0], Mapping):
            request.chat.CopyFrom(_chat(prompt))
        else:
            request.token_ids.CopyFrom(token_ids(prompt))


def token_ids(tokens: Sequence[Any]) -> pb.TokenIds:
    # index() accepts integers of numpy and torch, but no floats or strings
    return pb.TokenIds(ids=[item.__index__() for item in tokens])


def _chat(messages: Sequence[Any]) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[_message(turn) for turn in messages])


def _message(turn: Mapping[str, Any]) -> pb.ChatMessage:
    calls = [
        pb.ToolCall(id=one["id"], name=one["function"]["name"], arguments=one["function"]["arguments"])
        for one in turn.get("tool_calls") or ()
    ]
    rest = {name: turn[name] for name in ("tool_call_id", "reasoning", "name") if turn.get(name) is not None}
    content = turn["content"] if not calls else turn.get("content") or ""
    return pb.ChatMessage(role=turn["role"], content=content, tool_calls=calls, **rest)


def _set_chat_option(request: pb.GenerateRequest, name: str, value: Any) -> None:
    if value is None:
        return
    if request.WhichOneof("prompt") != "chat":
        raise InvalidRequestError(f"{name}: only with a conversation", field=name)
    chat = request.chat
    with naming(name):
        if name == "tools":
            chat.tools.extend(_tool(one["function"]) for one in value)
        elif name == "tool_choice" and value not in ("none", "auto", "required"):
            chat.tool_name = value
        elif name == "template_kwargs":
            chat.template_kwargs = json.dumps(value)
        else:
            setattr(chat, name, value)


def _tool(function: Mapping[str, Any]) -> pb.Tool:
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )


def _set_option(options: pb.GenerateRequest | pb.GenerateOptions, name: str, value: Any) -> None:
    if isinstance(options, pb.GenerateOptions) and name in _RULES:
        if value is not None:
            _set_rule(options.grammar, name, value)
        return
    if name not in options.DESCRIPTOR.fields_by_name:
        raise InvalidRequestError(f"unknown option {name!r}", field=name)
    if value is None:
        return
    with naming(name):
        if name in _REPEATED:
            getattr(options, name).extend([value] if isinstance(value, str) else value)
            if name == "allowed_token_ids" and not getattr(options, name):
                raise ValueError("must name at least one token")  # on the wire an empty list allows all
        elif name == "logit_bias":
            getattr(options, name).update(value)
        else:
            setattr(options, name, value)


def _set_rule(grammar: common_pb2.Grammar, name: str, value: Any) -> None:
    if other := grammar.WhichOneof("rule"):
        raise InvalidRequestError(f"{name}: not with {other}: an answer has one grammar", field=name)
    with naming(name):
        if name == "choice":
            grammar.choice.texts.extend([value] if isinstance(value, str) else value)
        elif name == "json_schema" and not isinstance(value, str):
            grammar.json_schema = json.dumps(value)
        else:
            setattr(grammar, name, value)


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Convert an error of protobuf about a value into InvalidRequestError with the field's name."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: {error}", field=field) from error
