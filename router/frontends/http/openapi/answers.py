"""Schemas of answers: whole, in chunks, and errors."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from router.frontends.http.openapi.messages import message_schemas
from router.frontends.http.openapi.responses import response_schemas
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
    some,
    text,
)
from router.gateway import RequestGateway
from router.observe.live.history import POINTS, ChartPoint, Percentiles
from router.request.permissions import ADMIN_TIMINGS
from wire import inference_pb2

_PERCENTILES = ("ttft", "itl")
ERROR_TYPES = ("invalid_request_error", "rate_limit_error", "server_error")


def answer_schemas(gateway: RequestGateway) -> dict[str, Schema]:
    return {
        "Error": _error(),
        "Usage": _usage(),
        "Baton": _baton(),
        "ChatLogprobs": _chat_logprobs(),
        "CompletionLogprobs": _completion_logprobs(),
        "ChatCompletion": _answer("chat.completion", _chat_choice(), **_prompt()),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", _chat_delta(), prompt_token_ids=_PROMPT_IDS),
        "Completion": _answer(
            "text_completion",
            _completion_choice({"finish_reason": one_of(["stop", "length"]), **_STOPPED}, **_prompt()),
        ),
        "CompletionChunk": _chunk(
            "text_completion",
            _completion_choice(
                {"finish_reason": one_of(["stop", "length", None])}, prompt_token_ids=_PROMPT_IDS, **_STOPPED
            ),
        ),
        "Embeddings": _embeddings(),
        "Scores": _scores(),
        "Ranking": _ranking(),
        **response_schemas(),
        **message_schemas(),
        "Model": record(
            {
                "id": text(minLength=1, examples=[one.name for one in gateway.models]),
                "object": one_of(["model"]),
                "created": COUNT,
                "owned_by": one_of(["baton"]),
                "max_model_len": COUNT,
                "structured_output": BOOLEAN,
                "aliases": array(text()),
                "structured_output_reason": text(description="the reason, if structured_output is false"),
                "tools": record(
                    {"parser": optional(text(description="of tool calls; null: requests may have no tools"))}
                ),
                "reasoning": record({"parser": optional(text(description="null: reasoning stays content"))}),
                "generation": BOOLEAN,
                "embedding": optional(
                    record(
                        {"dimensions": COUNT, "pooling": text(), "normalised": BOOLEAN, "max_tokens": COUNT}
                    )
                ),
                "embedding_reason": text(description="the reason, if embedding is null"),
                "parent": text(description="of an adapter: the model that it changes"),
            },
            [
                *("id", "object", "created", "owned_by", "max_model_len", "structured_output"),
                *("tools", "reasoning", "generation", "embedding"),
            ],
        ),
        "ModelList": record({"object": one_of(["list"]), "data": array(ref("Model"))}),
        "LoadedAdapter": record({"id": text(minLength=1), "digest": text()}),
        "UnloadedAdapter": record({"id": text(minLength=1)}),
        "Cluster": _cluster(),
        "ClusterLive": _cluster_live(),
    }


def _error() -> Schema:
    inner = record(
        {
            "message": text(minLength=1),
            "type": one_of(ERROR_TYPES),
            "param": optional(text(description="the field or limit concerned")),
            "code": optional(text()),
        }
    )
    return record({"error": inner})


def _usage() -> Schema:
    return record(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": record({"cached_tokens": COUNT}),
            "completion_tokens_details": record({"reasoning_tokens": COUNT}),
        },
        ["prompt_tokens", "completion_tokens", "total_tokens"],
        description="usage so far, in chunks before the last; without details",
    )


def _embeddings() -> Schema:
    vector = either(array(NUMBER), text(contentEncoding="base64", description="float32, little-endian"))
    entry = record({"object": one_of(["embedding"]), "index": COUNT, "embedding": vector})
    return record(
        {
            "object": one_of(["list"]),
            "data": array(entry),
            "model": text(),
            "usage": _usage_of_inputs(),
            "baton": ref("Baton"),
        }
    )


def _usage_of_inputs() -> Schema:
    cached = record({"cached_tokens": COUNT})
    return record({"prompt_tokens": COUNT, "total_tokens": COUNT, "prompt_tokens_details": cached})


_SIMILARITY = {"type": "number", "minimum": -1, "maximum": 1}


def _scores() -> Schema:
    score = record({"index": COUNT, "object": one_of(["score"]), "score": _SIMILARITY})
    rest = {"data": array(score), "usage": _usage_of_inputs(), "baton": ref("Baton")}
    return record({**_head("list"), **rest})


def _ranking() -> Schema:
    document = record({"text": text()})
    result = record(
        {"index": COUNT, "document": document, "relevance_score": _SIMILARITY}, ["index", "relevance_score"]
    )
    rest = {"results": array(result), "usage": _usage_of_inputs(), "baton": ref("Baton")}
    return record({"id": text(), "model": text(), **rest})


def _baton() -> Schema:
    """The fields of Timings in inference.proto."""
    kinds = {
        FieldDescriptor.CPPTYPE_DOUBLE: NUMBER,
        FieldDescriptor.CPPTYPE_STRING: text(),
        FieldDescriptor.CPPTYPE_UINT32: COUNT,
        FieldDescriptor.CPPTYPE_UINT64: COUNT,
    }
    timings = {field.name: kinds[field.cpp_type] for field in inference_pb2.Timings.DESCRIPTOR.fields}
    return record(
        {**timings, "explanation": text()},
        [name for name in timings if name not in ADMIN_TIMINGS],
        description="where the time went (seconds) and what was shipped; queues and workers for admins' keys only",
    )


def _head(name: str) -> dict[str, Schema]:
    return {"id": text(), "object": one_of([name]), "created": COUNT, "model": text()}


def _answer(name: str, choice: Schema, **further: Schema) -> Schema:
    """`further`: what only some requests get."""
    properties = {**_head(name), "choices": array(choice), "usage": ref("Usage"), "baton": ref("Baton")}
    return record({**properties, **further}, list(properties))


def _chunk(name: str, choice: Schema, **further: Schema) -> Schema:
    """Schema of a chunk. The one that ends the last choice has the timings; one with usage and no choices may follow."""
    head = _head(name)
    properties = {**head, "choices": array(choice), "usage": optional(ref("Usage")), "baton": ref("Baton")}
    return record({**properties, **further}, [*head, "choices"])


_TOKEN_IDS = array(COUNT, description="where return_token_ids asks for them")
_PROMPT_IDS = array(COUNT, description="the prompt, where return_token_ids asks for it; once in a stream")
# Beside each finish_reason that is not null
_STOPPED = {
    "stop_reason": either(
        *(text(), COUNT, NULL),
        description="the stop string or the id of stop_token_ids that ended the choice; null: neither did",
    )
}


_REASONING = {
    "reasoning_content": text(),
    "reasoning": text(description="the same, under vLLM's newer name"),
}


def _chat_choice() -> Schema:
    function = record(
        {"name": text(), "arguments": text(description="a JSON object, if the call is complete")}
    )
    call = record({"id": text(), "type": one_of(["function"]), "function": function})
    content = optional(text(description="null: the answer is tool calls only"))
    message = record(
        {
            "role": one_of(["assistant"]),
            "content": content,
            "refusal": NULL,
            **_REASONING,
            "tool_calls": array(call, minItems=1),
        },
        ["role", "content", "refusal"],
    )
    finish = one_of(["stop", "length", "tool_calls"])
    logprobs = optional(ref("ChatLogprobs"))
    return _choice({"message": message, "logprobs": logprobs, "finish_reason": finish, **_STOPPED})


def _chat_delta() -> Schema:
    function = record({"name": text(), "arguments": text()}, ["arguments"])
    call = record(
        {"index": COUNT, "id": text(), "type": one_of(["function"]), "function": function},
        ["index", "function"],
    )
    delta = record(
        {
            "role": one_of(["assistant"]),
            "content": text(),
            **_REASONING,
            "tool_calls": array(call, minItems=1, description="id and name with a call's first piece"),
        },
        [],
    )
    finish = one_of(["stop", "length", "tool_calls", None])
    logprobs = optional(ref("ChatLogprobs"))
    return _choice({"delta": delta, "logprobs": logprobs, "finish_reason": finish}, **_STOPPED)


def _completion_choice(finish: dict[str, Schema], **further: Schema) -> Schema:
    logprobs = optional(ref("CompletionLogprobs"))
    return _choice({"text": text(), "logprobs": logprobs, **finish}, **further)


def _choice(properties: dict[str, Schema], **further: Schema) -> Schema:
    properties = {"index": COUNT, **properties}
    return record({**properties, "token_ids": _TOKEN_IDS, **further}, list(properties))


def _prompt() -> dict[str, Schema]:
    return {"prompt_logprobs": _prompt_logprobs(), "prompt_token_ids": _PROMPT_IDS}


def _prompt_logprobs() -> Schema:
    """vLLM's: by token id, for each position of the prompt but the first."""
    one = record({"logprob": optional(NUMBER), "rank": COUNT, "decoded_token": text()})
    return array(optional({"type": "object", "additionalProperties": one}))


def _chat_logprobs() -> Schema:
    token = {"token": text(), "logprob": optional(NUMBER), "bytes": array({"type": "integer"})}
    content = record({**token, "top_logprobs": array(record(token))})
    return record({"content": array(content), "refusal": NULL})


def _completion_logprobs() -> Schema:
    top = {"type": "object", "additionalProperties": optional(NUMBER)}
    return record(
        {
            "tokens": array(text()),
            "token_logprobs": array(optional(NUMBER)),
            "top_logprobs": array(optional(top)),
            "text_offset": array(COUNT),
        }
    )


def _cluster() -> Schema:
    worker = some(
        id=text(),
        role=one_of(["prefill", "decode"]),
        address=text(),
        epoch=text(pattern="^[0-9a-f]{16}$"),
        slot={},
        state={},
        lease=text(),
        metrics={},
        status={"type": "object"},
    )
    anything = {"type": "object"}
    placement = some(
        no_handoff=text(description="why no KV was handed over; empty: some was, or no request came")
    )
    return some(router=anything, redis=some(ok=BOOLEAN), placement=placement, workers=array(worker))


def _cluster_live() -> Schema:
    """The live view, which router/observe/live/view.py makes."""
    router = some(
        id=text(),
        state=one_of(["ready", "not ready", "draining", "gone"]),
        uptime_seconds=NUMBER,
        requests_in_flight=NUMBER,
        requests_per_second=NUMBER,
        output_tokens_per_second=NUMBER,
    )
    worker = some(
        id=text(),
        role=one_of(["prefill", "decode"]),
        state=one_of(["ready", "draining", "suspect", "dead"]),
        prompt_tokens_per_second=NUMBER,
        output_tokens_per_second=NUMBER,
        handoffs_per_second=NUMBER,
        prefix_hit_ratio=optional(NUMBER),
    )
    flow = some(**{"from": text(), "to": text(), "bytes_per_second": NUMBER, "handoffs_per_second": NUMBER})
    return some(
        router=text(),
        redis=some(ok=BOOLEAN),
        window_seconds=some(rates=NUMBER, percentiles=NUMBER),
        now=_now(),
        routers=array(router),
        workers=array(worker),
        flows=array(flow),
        history=_history(),
    )


def _now() -> Schema:
    percentiles = some(**{name: optional(NUMBER) for name in Percentiles._fields})
    figures = {name: percentiles if name in _PERCENTILES else optional(NUMBER) for name in ChartPoint._fields}
    return some(requests_in_flight=NUMBER, no_handoff=text(), **figures)


def _history() -> Schema:
    """A list for every line of a chart, oldest first; null for intervals without data."""
    line = array(optional(NUMBER), maxItems=POINTS)
    rates = [name for name in ChartPoint._fields if name not in _PERCENTILES]
    latencies = [f"{name}_{part}" for name in _PERCENTILES for part in Percentiles._fields]
    return some(interval_seconds=NUMBER, **dict.fromkeys((*latencies, *rates), line))


def probe_schema(name: str) -> Schema:
    return record({name: BOOLEAN, "why": array(text(), description="what is missing, if anything")})


def ready_schema() -> Schema:
    fields = {
        **probe_schema("ready")["properties"],
        "models": {
            "type": "object",
            "additionalProperties": text(),
            "description": "why a model cannot be served, of a router with several",
        },
        "warnings": array(text(), description="what is wrong, and keeps no request from being served"),
    }
    return record(fields, required=["ready", "why"])


def health_schema() -> Schema:
    return record({"status": either(one_of(["ok"]))})


def version_schema() -> Schema:
    return record({"version": text(minLength=1)})
