"""The document: for every path its request, its answers and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from router.frontends.http.adapters import LOAD, UNLOAD, VLLM_FIELDS
from router.frontends.http.anthropic.models import VERSION_HEADER
from router.frontends.http.anthropic.request import CountTokensRequest, MessagesRequest
from router.frontends.http.gate import RERANK, SCORE
from router.frontends.http.openai.embeddings import EmbeddingRequest
from router.frontends.http.openai.requests import ChatCompletionRequest, CompletionRequest
from router.frontends.http.openai.scores import RerankRequest, ScoreRequest
from router.frontends.http.openai.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from router.frontends.http.openapi.answers import (
    answer_schemas,
    health_schema,
    probe_schema,
    ready_schema,
    version_schema,
)
from router.frontends.http.openapi.schema import Schema, either, optional, ref, text
from router.frontends.http.responses.request import ResponseRequest
from router.gateway import RequestGateway
from router.request.fields import filled
from router.request.limits import FieldLimits
from router.request.validator import MAX_REQUEST_ID

VERSION = "1"
_REFUSALS = {
    400: "The request is wrong, or not valid HTTP; `param` names the field.",
    401: "No API key, or not a valid one.",
    403: "The key does not allow it: an administrator's is needed, or one with a higher max_priority. Without keys: a web "
    "page of another origin asks.",
    404: "There is no such model.",
    405: "This path has another method.",
    408: "The head or the body of the request did not arrive in time.",
    409: "A worker does not load the adapter, or another call has unloaded it meanwhile: the message says which.",
    413: "The body is too large.",
    429: "Too much at once: the router, the tenant or the connection is full, a quota is used up, or the first "
    "token would come too late.",
    431: "The head is too large.",
    500: "An internal error.",
    503: "No worker of a needed role was available in time, or workers were too busy for the request.",
    504: "The deadline passed.",
}
_ALWAYS = (400, 405, 408, 429, 431, 500)
_GENERATE = (404, 413, 503, 504)
# Settings that no field's schema shows
_OTHER_LIMITS = (
    "max_body_bytes", "max_body_bytes_in_flight", "max_body_bytes_in_flight_per_tenant", "max_text_bytes",
    "max_json_depth", "max_json_elements", "max_answer_entries", "max_header_bytes", "max_headers",
    "header_seconds", "body_seconds", "write_seconds", "request_seconds", "max_http_connections",
    "http_idle_seconds", "max_grpc_connections", "grpc_idle_seconds", "max_health_watchers",
    "max_concurrent_requests", "max_concurrent_requests_per_tenant", "max_concurrent_requests_per_connection",
)  # fmt: skip
_SUMMARIES = {
    "chat": "Complete a conversation",
    "completion": "Complete a text",
    "response": "Complete a conversation of items; nothing is stored",
    "countInputTokens": "Count the tokens of a conversation of items",
    "message": "Complete a conversation, as Anthropic's clients ask for it",
    "countMessageTokens": "Count the tokens of a conversation, as Anthropic's clients ask for it",
    "embedding": "Embed texts",
    "score": "The similarity of the embeddings of texts",
    "rerank": "Order documents by the similarity of their embeddings to that of a query",
    "tokenize": "Tokenise a text or a conversation",
    "detokenize": "The text of tokens",
}
_REQUESTS = (
    *(ChatCompletionRequest, CompletionRequest, ResponseRequest, MessagesRequest),
    *(CountTokensRequest, EmbeddingRequest, ScoreRequest, RerankRequest),
    *(TokenizeRequest, TokenizeChatRequest, DetokenizeRequest),
)
_OF_MODEL: dict[str, Schema] = {
    "model": optional(
        text(description="the adapter's model; needed to load one where the router serves several")
    ),
    **VLLM_FIELDS,
}
_REQUEST_ID: Schema = {
    "name": "x-request-id",
    "in": "header",
    "required": False,
    "description": "returned with the answer, and named in log lines",
    "schema": text(maxLength=MAX_REQUEST_ID),
}


def build_document(gateway: RequestGateway) -> dict[str, Any]:
    """OpenAPI 3.1, with the limits of this router's configuration."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Baton",
            "version": VERSION,
            "description": "Serves language models with prefill and decode on separate workers. The endpoints are "
            "OpenAI's; the answer's `baton` says where its time went. Bounds that depend on the model are those of "
            "the model that allows most.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "x-limits": _limits(gateway),
        },
        "paths": _paths(gateway),
        "components": {
            "schemas": {**request_schemas(_widest(gateway)), **answer_schemas(gateway)},
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "baton-<id>-<secret>; also accepted in the header x-api-key",
                }
            },
        },
        # A router that requires no keys ignores one that is sent.
        "security": [{"apiKey": []}] if gateway.keys.on else [{}, {"apiKey": []}],
    }


class _Generator(GenerateJsonSchema):
    """Fields have no titles, and no defaults: a model's generation_config.json may set others."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        return optional(self.generate_inner(schema["schema"]))


def request_schemas(limits: FieldLimits) -> dict[str, Schema]:
    """The endpoints' requests and the objects in them, by name."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _REQUESTS],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    made: dict[str, Schema] = filled(schemas["$defs"], limits)
    return made


def _widest(gateway: RequestGateway) -> FieldLimits:
    return FieldLimits.widest([one.validator.limits for one in gateway.models])


def _limits(gateway: RequestGateway) -> dict[str, float | int]:
    limits = {name: getattr(gateway.config, name) for name in _OTHER_LIMITS}
    return {"max_model_len": _widest(gateway).max_model_len, **limits}


def _paths(gateway: RequestGateway) -> dict[str, Any]:
    keys = gateway.keys.on
    return {
        "/v1/chat/completions": {"post": _generate("chat", "ChatCompletion", keys)},
        "/v1/completions": {"post": _generate("completion", "Completion", keys)},
        "/v1/responses": {"post": _streaming("response", "Response", keys)},
        "/v1/responses/input_tokens": {"post": _input_tokens(keys)},
        "/v1/messages": {"post": _messages(keys)},
        "/v1/messages/count_tokens": {"post": _of_messages(_count_tokens(keys))},
        "/v1/embeddings": {"post": _asked("embedding", ref("EmbeddingRequest"), ref("Embeddings"), keys)},
        **_compared("score", SCORE, ref("ScoreRequest"), ref("Scores"), keys),
        **_compared("rerank", RERANK, ref("RerankRequest"), ref("Ranking"), keys),
        "/tokenize": {"post": _tokenize(keys)},
        "/detokenize": {"post": _asked("detokenize", ref("DetokenizeRequest"), ref("Text"), keys)},
        **_models(keys),
        "/v1/cluster": {
            "get": _get("cluster", "Workers, load, placement (an admin's key)", ref("Cluster"), keys, 403)
        },
        "/v1/cluster/live": {
            "get": _get(
                "clusterLive",
                "Rates, percentiles, five minutes of them (an admin's key)",
                ref("ClusterLive"),
                keys,
                403,
            )
        },
        LOAD: {
            "post": _post(
                *(
                    "loadAdapter",
                    "Load an adapter at all workers of a model (an admin's key)",
                    ref("LoadedAdapter"),
                    keys,
                ),
                {
                    "lora_name": text(minLength=1),
                    "lora_path": text(minLength=1, description="below lora_dir"),
                },
                _OF_MODEL,
                409,
            )
        },
        UNLOAD: {
            "post": _post(
                *("unloadAdapter", "Unload such an adapter (an admin's key)", ref("UnloadedAdapter"), keys),
                {"lora_name": text(minLength=1)},
                _OF_MODEL,
            )
        },
        "/metrics": {"get": _metrics(keys)},
        "/openapi.json": {"get": _get("openapi", "This document", {"type": "object"}, keys)},
        "/version": _probed(_get("version", "The version of the router's package", version_schema(), keys)),
        "/health": _probed(_open("health", "The router runs", health_schema())),
        "/ping": _ping(),
        "/live": _probed(_open("live", "The router's event loop runs", probe_schema("live"))),
        "/ready": _probed(_ready()),
    }


def _models(keys: bool) -> dict[str, Any]:
    every, one = either(ref("ModelList"), ref("MessageModelList")), either(ref("Model"), ref("MessageModel"))
    name = {"name": "model", "in": "path", "required": True, "schema": text(minLength=1)}
    listed = _get("models", "The served models", every, keys) | {"parameters": [_VERSION]}
    shown = _get("model", "A model by name", one, keys, 404) | {"parameters": [name, _VERSION]}
    for made in (listed, shown):
        _errors_of_both(made["responses"])
    return {"/v1/models": {"get": listed}, "/v1/models/{model}": {"get": shown}}


def _probed(get: dict[str, Any]) -> dict[str, Any]:
    """GET, and HEAD, whose answers have no bodies."""
    answers = {status: {"description": one["description"]} for status, one in get["responses"].items()}
    head = {**get, "operationId": f"{get['operationId']}Head", "responses": answers}
    return {"get": get, "head": head}


def _ping() -> dict[str, Any]:
    summary = "As /health, for SageMaker and for clients of vLLM"
    post = _open("pingPost", summary, health_schema())
    return {**_probed(_open("ping", summary, health_schema())), "post": post}


def _ready() -> dict[str, Any]:
    made = _open("ready", "Requests can be served", ready_schema())
    made["responses"]["503"] = _content("They cannot", ready_schema())
    return made


def _generate(name: str, schema: str, keys: bool) -> dict[str, Any]:
    made = _asked(name, ref(f"{schema}Request"), ref(schema), keys)
    whole = made["responses"]["200"]
    whole["description"] = "The answer, or its events where stream = true"
    whole["content"]["text/event-stream"] = {"schema": _event(schema)}
    whole["headers"] = {"x-request-id": {"schema": text()}}
    return made


def _asked(name: str, request: Schema, answer: Schema, keys: bool) -> dict[str, Any]:
    """A POST with a body, which takes a place."""
    return {
        "operationId": name,
        "summary": _SUMMARIES[name],
        "parameters": [_REQUEST_ID],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": request}},
        },
        "responses": {
            "200": _content("The answer", answer),
            **_refusals(*_ALWAYS, *_GENERATE, *((401, 403) if keys else (403,))),
        },
    }


def _compared(name: str, paths: Sequence[str], request: Schema, answer: Schema, keys: bool) -> dict[str, Any]:
    """One endpoint at several paths."""
    asked = _asked(name, request, answer, keys)
    names = [name, *(f"{name}At{path.split('/')[1].upper()}" for path in paths[1:])]
    return {path: {"post": asked | {"operationId": one}} for path, one in zip(paths, names, strict=True)}


def _tokenize(keys: bool) -> dict[str, Any]:
    request = either(ref("TokenizeRequest"), ref("TokenizeChatRequest"))
    return _asked("tokenize", request, ref("Tokens"), keys)


def _input_tokens(keys: bool) -> dict[str, Any]:
    return _asked("countInputTokens", ref("ResponseRequest"), ref("InputTokens"), keys)


def _count_tokens(keys: bool) -> dict[str, Any]:
    return _asked("countMessageTokens", ref("CountTokensRequest"), ref("MessageTokens"), keys)


def _messages(keys: bool) -> dict[str, Any]:
    made = _streaming("message", "MessagesAnswer", keys)
    made["requestBody"]["content"]["application/json"]["schema"] = ref("MessagesRequest")
    return _of_messages(made)


def _of_messages(made: dict[str, Any]) -> dict[str, Any]:
    """With errors as Anthropic has them; a request that is not valid HTTP gets OpenAI's."""
    answers = made["responses"]
    answers["529"] = answers.pop("503")
    for answer in answers.values():
        answer.setdefault("headers", {})["request-id"] = {"schema": text()}
    _errors_of_both(answers)
    return made


def _errors_of_both(answers: dict[str, Any]) -> None:
    """Errors in Anthropic's form or in OpenAI's."""
    for status, answer in answers.items():
        if status != "200":
            errors = either(ref("MessageError"), ref("Error"))
            answer["content"] = {"application/json": {"schema": errors}}


def _streaming(name: str, schema: str, keys: bool) -> dict[str, Any]:
    """Events that are named by their types."""
    made = _generate(name, schema, keys)
    events = made["responses"]["200"]["content"]["text/event-stream"]
    data = text(contentMediaType="application/json", contentSchema=ref(f"{schema}Event"))
    events["schema"] = {
        "type": "object",
        "properties": {"data": data, "event": text(description="the type of the event")},
        "required": ["data", "event"],
    }
    return made


def _event(schema: str) -> Schema:
    """One event of a stream: a chunk as JSON, an error in its place, or `[DONE]` at the end."""
    piece = text(
        contentMediaType="application/json", contentSchema=either(ref(f"{schema}Chunk"), ref("Error"))
    )
    data = either({"const": "[DONE]"}, piece)
    event = text(description="never sent: what every event is without it, `message`")
    return {"type": "object", "properties": {"data": data, "event": event}, "required": ["data"]}


_VERSION = {
    "name": VERSION_HEADER,
    "in": "header",
    "required": False,
    "description": "with any value: models and errors are shown in Anthropic's form",
    "schema": text(),
}


def _get(name: str, summary: str, schema: Schema, keys: bool, *more: int) -> dict[str, Any]:
    needs = (401,) if keys else (403,)
    return {
        "operationId": name,
        "summary": summary,
        "responses": {"200": _content(summary, schema), **_refusals(*_ALWAYS, *needs, *more)},
    }


def _post(
    name: str,
    summary: str,
    schema: Schema,
    keys: bool,
    fields: dict[str, Schema],
    further: dict[str, Schema],
    *more: int,
) -> dict[str, Any]:
    """`fields` are needed, `further` ones not; `more`: statuses beside those of other calls."""
    made = _get(name, summary, schema, keys, 403, *_GENERATE, *more)
    properties = fields | further
    body = {"type": "object", "properties": properties, "required": [*fields], "additionalProperties": False}
    return made | {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _open(name: str, summary: str, schema: Schema) -> dict[str, Any]:
    """An endpoint for probes, which send no keys."""
    made = {**_get(name, summary, schema, keys=False), "security": []}
    del made["responses"]["403"]  # open to any page
    return made


def _metrics(keys: bool) -> dict[str, Any]:
    made = _get("metrics", "Prometheus metrics (an admin's key)", text(), keys, 403)
    made["responses"]["200"]["content"] = {"text/plain": {"schema": text()}}
    return made


def _content(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals(*statuses: int) -> dict[str, Any]:
    made = {str(status): _content(_REFUSALS[status], ref("Error")) for status in sorted(set(statuses))}
    if "429" in made:
        made["429"]["headers"] = {
            "retry-after": {
                "description": "seconds until trying again may help",
                "schema": {"type": "integer"},
            }
        }
    if "401" in made:
        made["401"]["headers"] = {"www-authenticate": {"schema": text()}}
    return made
