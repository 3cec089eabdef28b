"""The HTTP application: routes, and one place that turns errors into answers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import ForbiddenError, InvalidRequestError, UnknownModelError
from cluster.membership.types import WorkerInfo
from cluster.telemetry.exposition import OPEN_METRICS, accepts_open_metrics, encode
from cluster.version import VERSION
from router.frontends.http.adapters import LOAD, UNLOAD, AdapterCalls
from router.frontends.http.anthropic.endpoint import Messages
from router.frontends.http.anthropic.errors import is_messages, messages_error_response
from router.frontends.http.anthropic.models import (
    asks_as_anthropic,
    lists_models_as_anthropic,
    shown_list,
    shown_model,
)
from router.frontends.http.connection.exchange import Exchange
from router.frontends.http.errors import error_body, failure_response
from router.frontends.http.gate import ADMIN, GENERATE, RERANK, SCORE, caller_of
from router.frontends.http.openai.embeddings import Embeddings
from router.frontends.http.openai.generate import Generate
from router.frontends.http.openai.scores import Comparing, RerankRequest, ScoreRequest
from router.frontends.http.openai.tokenize import Tokenizing
from router.frontends.http.openapi.document import build_document
from router.frontends.http.responses.endpoint import Responses
from router.frontends.http.serving import Serving
from router.frontends.http.shared_views import SharedViews
from router.frontends.http.ui.pages import Page, read_pages
from router.gateway import RequestGateway
from router.request.served_model import ServedModel, listed

Endpoint = Callable[[Request], Awaitable[Response]]
Generation = Callable[[Exchange], Awaitable[Response | None]]  # None: it has streamed its answer


MAX_DOCUMENTS = 64  # kept, for keys with different models
PROBED = ("GET", "HEAD")  # methods of probes: the connection sends no body to HEAD


class Routes(NamedTuple):
    """By method and path: `generations`, which write to the connection; everything else is the application's."""

    generations: Mapping[tuple[str, str], Generation]
    app: ASGIApp


class App:
    """Calls the endpoints of probes and fixed answers directly, and the framework for all others: its layers cost about
    0.3 ms per request."""

    def __init__(self, rest: ASGIApp, direct: Mapping[tuple[str, str], Endpoint]):
        """`direct`: endpoints by method and path."""
        self._rest = rest
        self._direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._rest(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


class Views:
    """Endpoints that show the router's configuration, encoded once, and its state."""

    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway
        self._encoded_models: tuple[list[Mapping[str, str]], dict[str, bytes], bytes] | None = None
        self._document = orjson.dumps(build_document(gateway))
        self._documents: dict[frozenset[str], bytes] = {}  # by what a key may name
        self._shared = SharedViews()

    async def health(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def version(self, request: Request) -> Response:
        return _json({"version": VERSION})

    async def live(self, request: Request) -> Response:
        """The event loop runs, or this would not be answered."""
        return _json({"live": True, "why": []})

    async def ready(self, request: Request) -> Response:
        why = self._gateway.why_router_not_ready()
        # Clients need no key here, and where keys are on, a key decides which models a client sees.
        open_to_all = not self._gateway.keys.on
        found = {"models": self._gateway.why_not_served(), "warnings": self._gateway.warnings()}
        more = {name: said for name, said in found.items() if said} if open_to_all else {}
        return _json({"ready": not why, "why": why, **more}, 503 if why else 200)

    async def models(self, request: Request) -> Response:
        caller = caller_of(request)
        of_name, every = self._all()
        if asks_as_anthropic(request):
            return _json(
                shown_list(orjson.loads(one) for name, one in of_name.items() if caller.may_name(name))
            )
        if caller.models:
            every = _list([one for name, one in of_name.items() if caller.may_name(name)])
        return _encoded(every)

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        model = self._gateway.model(asked)
        name = model.name if asked in model.aliases else asked
        found = self._all()[0].get(name)
        if found is None or not caller_of(request).may_name(name):
            raise UnknownModelError(
                "this model is not served here; GET /v1/models lists what is", field="model"
            )
        return _json(shown_model(orjson.loads(found))) if asks_as_anthropic(request) else _encoded(found)

    def _all(self) -> tuple[dict[str, bytes], bytes]:
        """Each model, and the list of all: those that are served, and after each the adapters that workers have loaded."""
        served = self._gateway.models
        adapters = [one.validator.limits.adapters() for one in served]
        if self._encoded_models is None or self._encoded_models[0] != adapters:
            models, shown = [], {one.name: _model(one, self._gateway.created_unix_seconds) for one in served}
            for one, name, parent in listed(self._gateway.models):
                own = {key: value for key, value in shown[one.name].items() if key != "aliases"}
                models.append({**own, "id": name, "parent": parent} if parent else shown[name])
            of_name = {str(model["id"]): orjson.dumps(model) for model in models}
            self._encoded_models = adapters, of_name, _list(of_name.values())
        return self._encoded_models[1:]

    async def document(self, request: Request) -> Response:
        models = caller_of(request).models
        return _encoded(self._document_for(models) if models else self._document)

    def _document_for(self, models: frozenset[str]) -> bytes:
        """The document for a key with these models, which names no other one. Made in about 5 ms, and kept."""
        if models not in self._documents:
            if len(self._documents) >= MAX_DOCUMENTS:
                self._documents.clear()
            gateway = self._gateway
            names = {name: gateway.model(name).name for name in gateway.first.validator.limits.accepted_names}
            hidden = {name for name, model in names.items() if model not in models}
            lists = list(names), [one.name for one in gateway.models]
            self._documents[models] = orjson.dumps(_without(orjson.loads(self._document), lists, hidden))
        return self._documents[models]

    async def cluster(self, request: Request) -> Response:
        async def made() -> bytes:
            return orjson.dumps(await _cluster_view(self._gateway))

        return _encoded(await self._shared.get("cluster", made))

    async def cluster_live(self, request: Request) -> Response:
        async def made() -> bytes:
            return orjson.dumps(self._gateway.live.view())

        return _encoded(await self._shared.get("live", made))

    async def metrics(self, request: Request) -> Response:
        # Two formats, however clients ask
        accept = OPEN_METRICS if accepts_open_metrics(request.headers.get("accept", "")) else ""

        async def made() -> tuple[bytes, str]:
            member = self._gateway.member
            if member is None:
                return encode(self._gateway.metrics.registry, accept)
            return await member.parent.metrics(accept)

        body, content_type = await self._shared.get(f"metrics {accept}", made)
        return Response(body, media_type=content_type)


async def _cluster_view(gateway: RequestGateway) -> dict[str, Any]:
    """Workers, load, placement. No secrets, no prompts."""
    services = gateway.services
    await services.members.refresh_status()
    return {
        "router": _router(gateway),
        "redis": {"ok": services.members.redis_ok},
        "placement": {
            "calls": await services.placement.calls_in_redis(),
            "calls_here": services.placement.calls,
            "mode": services.placement.mode,
            "requests": gateway.requests,
            "no_handoff": services.no_handoff(),
        },
        "workers": [_worker(worker) for worker in services.members.all],
    }


def _router(gateway: RequestGateway) -> dict[str, Any]:
    uptime, member = time.monotonic() - gateway.started, gateway.member
    if member is None:
        return {
            "id": gateway.config.router_id,
            "uptime_seconds": uptime,
            "requests_in_flight": gateway.admission.in_flight,
            "requests": gateway.requests,
        }
    return {
        "id": member.name,
        "process": member.index,
        "processes": member.processes,
        "uptime_seconds": uptime,
        "requests_in_flight": member.in_flight(),
        "requests": member.requests(),
    }


def _worker(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "address": worker.address,
        "epoch": f"{worker.epoch:016x}",
        "slot": worker.slot,
        "state": worker.state,
        "lease": worker.lease,
        "metrics": worker.metrics_address,
        "status": worker.status.encode(),
    }


def _model(served: ServedModel, created: int) -> dict[str, Any]:
    shown = {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "max_model_len": served.validator.limits.max_model_len,
        "structured_output": not served.grammars.refusal,
        "tools": {"parser": served.plans.tool_parser or None},
        "reasoning": {"parser": served.plans.reasoning_parser or None},
        "generation": served.text.has_head,
        **_embedding(served),
    }
    reason = {"structured_output_reason": served.grammars.refusal} if served.grammars.refusal else {}
    return {**shown, **reason, **({"aliases": served.aliases} if served.aliases else {})}


def _embedding(served: ServedModel) -> dict[str, Any]:
    how = served.text.embedding
    if how is None:
        return {"embedding": None, "embedding_reason": served.text.embedding_refusal}
    shown = {"dimensions": how.dimensions, "pooling": how.pooling.name.lower(), "normalised": how.normalised}
    return {"embedding": {**shown, "max_tokens": served.validator.longest_input(how)[0]}}


def build_routes(gateway: RequestGateway) -> Routes:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    serving, views = Serving(gateway), Views(gateway)
    generate, tokenizing = Generate(serving), Tokenizing(serving)
    messages, responses = Messages(serving, tokenizing), Responses(serving, tokenizing)
    generations = {
        ("POST", "/v1/chat/completions"): generate.chat,
        ("POST", "/v1/completions"): generate.completion,
        ("POST", "/v1/responses"): responses.create,
        ("POST", "/v1/responses/input_tokens"): responses.count,
        ("POST", "/v1/messages"): messages.create,
        ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
        ("POST", "/v1/embeddings"): Embeddings(serving).create,
        **{("POST", path): Comparing(serving, "score", ScoreRequest).create for path in SCORE},
        **{("POST", path): Comparing(serving, "rerank", RerankRequest).create for path in RERANK},
        ("POST", "/tokenize"): tokenizing.tokenize,
        ("POST", "/detokenize"): tokenizing.detokenize,
    }
    for method, path in generations:
        assert path in GENERATE
        app.add_api_route(path, _not_found, methods=[method])
    direct: dict[tuple[str, str], Endpoint] = {}
    for path, (view, methods) in {
        "/health": (views.health, PROBED),
        "/live": (views.live, PROBED),
        "/ready": (views.ready, PROBED),
        "/ping": (views.health, (*PROBED, "POST")),
        "/version": (views.version, PROBED),
        "/v1/models": (views.models, ("GET",)),
    }.items():
        endpoint = _guard(view)
        direct |= {(method, path): endpoint for method in methods}
        app.add_api_route(path, endpoint, methods=list(methods))
    direct["GET", "/openapi.json"] = _guard(views.document)
    app.add_route("/openapi.json", direct["GET", "/openapi.json"])
    app.add_api_route("/v1/models/{model:path}", _guard(views.model), methods=["GET"])
    for path, endpoint in {
        "/v1/cluster": views.cluster,
        "/v1/cluster/live": views.cluster_live,
        "/metrics": views.metrics,
    }.items():
        assert path in ADMIN
        app.add_api_route(path, _guard(_for_admins(gateway, endpoint)), methods=["GET"])
    calls = AdapterCalls(gateway)
    for path, endpoint in {LOAD: calls.load, UNLOAD: calls.unload}.items():
        assert path in ADMIN
        app.add_api_route(path, _guard(_for_admins(gateway, endpoint)), methods=["POST"])
    if gateway.config.ui:
        for path, page in read_pages().items():
            app.add_api_route(path, _guard(partial(_page, page)), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    return Routes(generations, App(app, direct))


def _without(schema: Any, lists: Collection[list[str]], hidden: Collection[str]) -> Any:
    """A document whose lists of names, each one of `lists`, lack those that are hidden."""
    if isinstance(schema, dict):
        return {key: _without(value, lists, hidden) for key, value in schema.items()}
    if not isinstance(schema, list):
        return schema
    if schema in lists:
        return [name for name in schema if name not in hidden]
    return [_without(one, lists, hidden) for one in schema]


def _list(models: Iterable[bytes]) -> bytes:
    """The answer that lists encoded models."""
    return b'{"object":"list","data":[' + b",".join(models) + b"]}"


def _guard(endpoint: Endpoint) -> Endpoint:
    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            as_anthropic = lists_models_as_anthropic(request.scope)
            return failure_response(error, request.url.path, as_anthropic=as_anthropic)

    return guarded


def _for_admins(gateway: RequestGateway, endpoint: Endpoint) -> Endpoint:
    async def for_admins(request: Request) -> Response:
        if not caller_of(request).admin:
            gateway.metrics.refused()
            path = request.url.path
            raise ForbiddenError(f"{path}: needs a key with admin: true", field="authorization")
        return await endpoint(request)

    return for_admins


async def _not_found(request: Request) -> Response:
    """For other spellings of a generation's path; the framework also names the method to requests with another."""
    raise HTTPException(404)


async def _http_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, HTTPException) else None
    refusal = InvalidRequestError(f"{request.method} {request.url.path}: {error}")
    # With its headers: those of 405 name the allowed methods.
    status, headers = (known.status_code, known.headers) if known else (500, None)
    if is_messages(request.url.path):
        return messages_error_response(refusal, headers or {}, status=status)
    return _json(error_body(refusal), status, headers)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return _encoded(orjson.dumps(content), status, headers)


def _encoded(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=headers)


async def _page(page: Page, request: Request) -> Response:
    return page.answer(request)
