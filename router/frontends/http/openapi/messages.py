"""Schemas of Anthropic's messages, of their streams' events and errors, and of token counts."""

from __future__ import annotations

from typing import get_args

from router.frontends.http.anthropic.answer import StopReason
from router.frontends.http.anthropic.errors import ERROR_TYPES
from router.frontends.http.openapi.schema import (
    COUNT,
    NULL,
    Schema,
    array,
    either,
    one_of,
    optional,
    record,
    ref,
    some,
    text,
)

_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_TOKENS: dict[str, Schema] = {
    **dict.fromkeys(_COUNTS, COUNT),
    "output_tokens_details": record({"thinking_tokens": COUNT}),
}


def _model() -> Schema:
    """Further fields are those of OpenAI's form that describe the model."""
    return some(
        type=one_of(["model"]),
        id=text(minLength=1),
        display_name=text(),
        created_at=text(format="date-time"),
        max_input_tokens=COUNT,
    )


def message_schemas() -> dict[str, Schema]:
    return {
        "MessageError": record({**_error(), "type": one_of(["error"])}),
        "MessageBlock": _block(),
        "MessagesAnswer": _message(),
        "MessagesAnswerEvent": _event(),
        "MessageModel": _model(),
        "MessageModelList": record(
            {
                "data": array(ref("MessageModel")),
                "has_more": one_of([False]),
                "first_id": optional(text()),
                "last_id": optional(text()),
            }
        ),
        "MessageTokens": record({"input_tokens": COUNT}),
        "Tokens": record(
            {
                "count": COUNT,
                "max_model_len": COUNT,
                "tokens": array(COUNT),
                "token_strs": either(array(text()), NULL),
            }
        ),
        "Text": record({"prompt": text()}),
    }


def _error() -> dict[str, Schema]:
    details = record(
        {"error_code": text(), "unsupported": array(text())}, description="of a request with `thread`"
    )
    shown = {"type": one_of(ERROR_TYPES), "message": text(minLength=1)}
    return {
        "error": record({**shown, "details": details}, [*shown]),
        "request_id": text(),
    }


def _block() -> Schema:
    return either(
        record({"type": one_of(["text"]), "text": text()}),
        record({"type": one_of(["thinking"]), "thinking": text(), "signature": text()}),
        record({"type": one_of(["tool_use"]), "id": text(), "name": text(), "input": {"type": "object"}}),
    )


def _ending() -> dict[str, Schema]:
    return {"stop_reason": one_of([*get_args(StopReason), None]), "stop_sequence": optional(text())}


def _message() -> Schema:
    properties = {
        "id": text(),
        "type": one_of(["message"]),
        "role": one_of(["assistant"]),
        "model": text(),
        "content": array(ref("MessageBlock")),
        **_ending(),
        "usage": record({**_TOKENS, "service_tier": one_of(["standard"])}),
    }
    return record({**properties, "baton": ref("Baton")}, list(properties))


def _event() -> Schema:
    delta = either(
        record({"type": one_of(["text_delta"]), "text": text()}),
        record({"type": one_of(["thinking_delta"]), "thinking": text()}),
        record({"type": one_of(["signature_delta"]), "signature": text()}),
        record({"type": one_of(["input_json_delta"]), "partial_json": text()}),
    )
    fields: dict[str, dict[str, Schema]] = {
        "message_start": {"message": ref("MessagesAnswer")},
        "ping": {},
        "content_block_start": {"index": COUNT, "content_block": ref("MessageBlock")},
        "content_block_delta": {"index": COUNT, "delta": delta},
        "content_block_stop": {"index": COUNT},
        "message_delta": {"delta": record(_ending()), "usage": record(_TOKENS), "baton": ref("Baton")},
        "message_stop": {},
        "error": _error(),
    }
    return either(*(record({"type": one_of([kind]), **more}) for kind, more in fields.items()))
