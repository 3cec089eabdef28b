"""Schemas of a response and of its stream's events."""

from __future__ import annotations

from router.frontends.http.openapi.schema import (
    BOOLEAN,
    COUNT,
    NULL,
    NUMBER,
    Schema,
    array,
    either,
    one_of,
    optional,
    record,
    ref,
    text,
)

_OBJECT: Schema = {"type": "object"}
_STATUS = one_of(["in_progress", "completed", "incomplete"])


def response_schemas() -> dict[str, Schema]:
    return {
        "ResponseLogprobs": _logprobs(),
        "ResponseItem": _item(),
        "ResponseUsage": _usage(),
        "InputTokens": record({"object": one_of(["response.input_tokens"]), "input_tokens": COUNT}),
        "Response": _response(),
        "ResponseEvent": _event(),
    }


def _logprobs() -> Schema:
    token = {"token": text(), "logprob": optional(NUMBER), "bytes": array({"type": "integer"})}
    return array(record({**token, "top_logprobs": array(record(token))}))


def _output_text() -> Schema:
    return record(
        {
            "type": one_of(["output_text"]),
            "text": text(),
            "annotations": array(_OBJECT, maxItems=0),
            "logprobs": ref("ResponseLogprobs"),
        }
    )


def _reasoning_text() -> Schema:
    return record({"type": one_of(["reasoning_text"]), "text": text()})


def _item() -> Schema:
    head = {"id": text(), "status": _STATUS}
    message = {"role": one_of(["assistant"]), "content": array(_output_text())}
    reasoning = {
        "summary": array(_OBJECT, maxItems=0),
        "content": array(_reasoning_text()),
        "encrypted_content": optional(text(description="stands for the content in a later request's input")),
    }
    call = {"call_id": text(), "name": text(), "arguments": text()}
    return either(
        record({**head, "type": one_of(["message"]), **message}),
        record({**head, "type": one_of(["reasoning"]), **reasoning}),
        record({**head, "type": one_of(["function_call"]), **call}),
    )


def _usage() -> Schema:
    return record(
        {
            "input_tokens": COUNT,
            "input_tokens_details": record({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": record({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    )


def _response() -> Schema:
    properties = {
        "id": text(),
        "object": one_of(["response"]),
        "created_at": COUNT,
        "completed_at": optional(COUNT),
        "status": one_of(["in_progress", "completed", "incomplete", "failed"]),
        "error": either(record({"code": text(), "message": text()}), NULL),
        "incomplete_details": either(record({"reason": one_of(["max_output_tokens"])}), NULL),
        "output": array(ref("ResponseItem")),
        "usage": either(ref("ResponseUsage"), NULL),
        "background": one_of([False]),
        "instructions": optional(text()),
        "max_output_tokens": optional(COUNT),
        "max_tool_calls": NULL,
        "metadata": {"type": "object", "additionalProperties": text()},
        "model": text(),
        "parallel_tool_calls": BOOLEAN,
        "previous_response_id": NULL,
        "reasoning": record({"effort": optional(text()), "summary": NULL}),
        "service_tier": one_of(["default"]),
        "store": one_of([False]),
        "temperature": NUMBER,
        "text": record({"format": _OBJECT}),
        "tool_choice": either(text(), _OBJECT),
        "tools": array(_OBJECT),
        "top_logprobs": COUNT,
        "top_p": NUMBER,
        "truncation": one_of(["auto", "disabled"]),
    }
    required = list(properties)
    return record({**properties, "baton": ref("Baton")}, required, description="`baton` comes at the end")


def _event() -> Schema:
    place = {"item_id": text(), "output_index": COUNT}
    part = {**place, "content_index": COUNT}
    content = either(_output_text(), _reasoning_text())
    logprobs = ref("ResponseLogprobs")
    fields: dict[str, dict[str, Schema]] = {
        "output_item.added": {"output_index": COUNT, "item": ref("ResponseItem")},
        "output_item.done": {"output_index": COUNT, "item": ref("ResponseItem")},
        "content_part.added": {**part, "part": content},
        "content_part.done": {**part, "part": content},
        "output_text.delta": {**part, "delta": text(), "logprobs": logprobs},
        "output_text.done": {**part, "text": text(), "logprobs": logprobs},
        "reasoning_text.delta": {**part, "delta": text()},
        "reasoning_text.done": {**part, "text": text()},
        "function_call_arguments.delta": {**place, "delta": text()},
        "function_call_arguments.done": {**place, "name": text(), "arguments": text()},
    }
    for kind in ("created", "in_progress", "completed", "incomplete", "failed"):
        fields[kind] = {"response": ref("Response")}
    made = [_of_type(f"response.{kind}", more) for kind, more in fields.items()]
    error = {"code": text(), "message": text(), "param": optional(text())}
    return either(*made, _of_type("error", error))


def _of_type(kind: str, fields: dict[str, Schema]) -> Schema:
    return record({"type": one_of([kind]), **fields, "sequence_number": COUNT})
