"""The HTTP application: routes, and one place that turns errors into answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import BatonError, ForbiddenError, InternalError, InvalidRequestError, UnknownModelError
from cluster.telemetry.exposition import encode
from router.frontends.http.cluster_view import cluster_view
from router.frontends.http.errors import error_body, error_response
from router.frontends.http.gate import ADMIN, caller_of
from router.frontends.http.generate import Generate
from router.frontends.http.openapi.document import build_document
from router.frontends.http.ui.pages import Page, read_pages
from router.gateway import RequestGateway

log = logging.getLogger(__name__)
Endpoint = Callable[[Request], Awaitable[Response]]


class App:
    """Requests for tokens and probes go straight to their endpoints; the framework's layers serve the rest.

    Those layers cost about 0.3 ms per request, and more for every piece of a stream.
    """

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


def build_app(gateway: RequestGateway) -> App:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    generate = Generate(gateway)
    direct = {
        ("POST", "/v1/chat/completions"): _guard(generate.chat),
        ("POST", "/v1/completions"): _guard(generate.completion),
        ("GET", "/health"): _guard(_health),
        ("GET", "/live"): _guard(_live),
        ("GET", "/ready"): _guard(_ready(gateway)),
    }
    for (method, path), endpoint in direct.items():
        app.add_api_route(path, endpoint, methods=[method])
    app.add_api_route("/v1/models", _guard(_models(gateway)), methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", _guard(_model(gateway)), methods=["GET"])
    for path, endpoint in {
        "/v1/cluster": _cluster(gateway),
        "/v1/cluster/live": _live_view(gateway),
        "/metrics": _metrics(gateway),
    }.items():
        assert path in ADMIN
        app.add_api_route(path, _guard(_for_admins(gateway, endpoint)), methods=["GET"])
    if gateway.config.ui:
        for path, page in read_pages().items():
            app.add_api_route(path, _guard(_page(page)), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = partial(build_document, gateway)  # type: ignore[method-assign]
    return App(app, direct)


def _guard(endpoint: Endpoint) -> Endpoint:
    """Every error leaves as an OpenAI error body; an unexpected one is logged and says nothing more."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except BatonError as error:
            return error_response(error)
        except Exception:
            log.exception("%s failed", request.url.path)
            return error_response(InternalError("internal error"))

    return guarded


def _for_admins(gateway: RequestGateway, endpoint: Endpoint) -> Endpoint:
    async def for_admins(request: Request) -> Response:
        if not caller_of(request).admin:
            gateway.metrics.requests.labels("refused").inc()
            path = request.url.path
            raise ForbiddenError(f"{path}: needs a key with admin: true", field="authorization")
        return await endpoint(request)

    return for_admins


async def _http_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, HTTPException) else None
    body = error_body(InvalidRequestError(f"{request.method} {request.url.path}: {error}"))
    # With its headers: 405 says which methods are allowed.
    return _json(body, known.status_code if known else 500, known.headers if known else None)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json", headers=headers)


def _model_object(gateway: RequestGateway) -> dict[str, Any]:
    return {
        "id": gateway.validator.served_name,
        "object": "model",
        "created": gateway.created_unix_seconds,
        "owned_by": "baton",
        "max_model_len": gateway.validator.max_model_len,
    }


def _models(gateway: RequestGateway) -> Endpoint:
    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model_object(gateway)]})

    return models


def _model(gateway: RequestGateway) -> Endpoint:
    async def model(request: Request) -> Response:
        if request.path_params["model"] != gateway.validator.served_name:
            raise UnknownModelError(
                "this model is not served here; GET /v1/models lists what is", field="model"
            )
        return _json(_model_object(gateway))

    return model


def _cluster(gateway: RequestGateway) -> Endpoint:
    async def cluster(request: Request) -> Response:
        return _json(await cluster_view(gateway))

    return cluster


def _live_view(gateway: RequestGateway) -> Endpoint:
    async def live_view(request: Request) -> Response:
        return _json(gateway.live.view())

    return live_view


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


async def _live(request: Request) -> Response:
    """Answered by the loop that serves: that it is answered is the answer."""
    return _json({"live": True, "why": []})


def _ready(gateway: RequestGateway) -> Endpoint:
    async def ready(request: Request) -> Response:
        why = gateway.why_not_ready()
        return _json({"ready": not why, "why": why}, 503 if why else 200)

    return ready


def _page(page: Page) -> Endpoint:
    async def answer(request: Request) -> Response:
        return page.answer(request)

    return answer


def _metrics(gateway: RequestGateway) -> Endpoint:
    async def metrics(request: Request) -> Response:
        body, content_type = encode(gateway.metrics.registry, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return metrics
