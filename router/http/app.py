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
from router.front import Front
from router.http.cluster_view import cluster_view
from router.http.errors import error_body, error_response
from router.http.gate import ADMIN, caller_of
from router.http.generate import Generate
from router.http.openapi.document import build_document
from router.http.ui.pages import Page, read_pages

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


def build_app(front: Front) -> App:
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    generate = Generate(front)
    direct = {
        ("POST", "/v1/chat/completions"): _guard(generate.chat),
        ("POST", "/v1/completions"): _guard(generate.completion),
        ("GET", "/health"): _guard(_health),
        ("GET", "/live"): _guard(_live),
        ("GET", "/ready"): _guard(_ready(front)),
    }
    for (method, path), endpoint in direct.items():
        app.add_api_route(path, endpoint, methods=[method])
    app.add_api_route("/v1/models", _guard(_models(front)), methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", _guard(_model(front)), methods=["GET"])
    for path, endpoint in {
        "/v1/cluster": _cluster(front),
        "/v1/cluster/live": _live_view(front),
        "/metrics": _metrics(front),
    }.items():
        assert path in ADMIN
        app.add_api_route(path, _guard(_for_admins(front, endpoint)), methods=["GET"])
    if front.config.ui:
        for path, page in read_pages().items():
            app.add_api_route(path, _guard(_page(page)), methods=["GET"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.openapi = partial(build_document, front)  # type: ignore[method-assign]
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


def _for_admins(front: Front, endpoint: Endpoint) -> Endpoint:
    async def for_admins(request: Request) -> Response:
        if not caller_of(request).admin:
            front.metrics.requests.labels("refused").inc()
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


def _model_object(front: Front) -> dict[str, Any]:
    return {
        "id": front.validator.served_name,
        "object": "model",
        "created": front.created_unix_seconds,
        "owned_by": "baton",
        "max_model_len": front.validator.max_model_len,
    }


def _models(front: Front) -> Endpoint:
    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [_model_object(front)]})

    return models


def _model(front: Front) -> Endpoint:
    async def model(request: Request) -> Response:
        if request.path_params["model"] != front.validator.served_name:
            raise UnknownModelError(
                "this model is not served here; GET /v1/models lists what is", field="model"
            )
        return _json(_model_object(front))

    return model


def _cluster(front: Front) -> Endpoint:
    async def cluster(request: Request) -> Response:
        return _json(await cluster_view(front))

    return cluster


def _live_view(front: Front) -> Endpoint:
    async def live_view(request: Request) -> Response:
        return _json(front.live.view())

    return live_view


async def _health(request: Request) -> Response:
    return _json({"status": "ok"})


async def _live(request: Request) -> Response:
    """Answered by the loop that serves: that it is answered is the answer."""
    return _json({"live": True, "why": []})


def _ready(front: Front) -> Endpoint:
    async def ready(request: Request) -> Response:
        why = front.why_not_ready()
        return _json({"ready": not why, "why": why}, 503 if why else 200)

    return ready


def _page(page: Page) -> Endpoint:
    async def answer(request: Request) -> Response:
        return page.answer(request)

    return answer


def _metrics(front: Front) -> Endpoint:
    async def metrics(request: Request) -> Response:
        body, content_type = encode(front.metrics.registry, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return metrics
