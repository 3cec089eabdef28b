"""Authenticates every HTTP request before an endpoint answers it. The endpoint checks what its key may access.

A request is refused by its head alone, before its body is read.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import BatonError, UnauthenticatedError
from cluster.security.keys import ANYONE, Caller
from router.frontends.http.adapters import LOAD, UNLOAD
from router.frontends.http.anthropic.models import lists_models_as_anthropic
from router.frontends.http.errors import error_response
from router.frontends.http.ui.pages import PATHS
from router.frontends.http.web_pages import WebPages
from router.gateway import RequestGateway

# Probes send no keys, nor does a browser that loads the page; the page's own requests for data send one. Every other
# path requires a key, even if it does not exist.
OPEN = frozenset({"/health", "/live", "/ready", "/ping"})
# They show every tenant's load and the workers' addresses, or change what workers load. The routes check the key
# (router/frontends/http/app.py), because their patterns also match other spellings, such as "/metrics\n".
ADMIN = frozenset({"/metrics", "/v1/cluster", "/v1/cluster/live", LOAD, UNLOAD})
# vLLM's paths of one endpoint each
SCORE = ("/score", "/v1/score")
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")
# They have places and quotas; every other request is a step of low priority.
GENERATE = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
        *("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *SCORE,
        *RERANK,
    }
)
CALLER = "baton.caller"


class Gate:
    def __init__(self, app: ASGIApp, gateway: RequestGateway):
        self._app = app
        self._gateway = gateway
        self._open = OPEN | PATHS if gateway.config.ui else OPEN
        self._web_pages = WebPages(gateway.config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = await self.refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    async def refusal(self, scope: Scope) -> Response | None:
        """The answer in place of the endpoint's. None: the request may go on, and its scope has its caller."""
        try:
            caller = scope[CALLER] = self._caller(scope)
        except BatonError as error:
            await self._gateway.low_priority.step()
            as_anthropic = lists_models_as_anthropic(scope)
            refusal = error_response(error, scope["path"], as_anthropic=as_anthropic)
            # The body may still arrive, and is not read.
            refusal.headers["connection"] = "close"
            self._gateway.metrics.refused()
            return refusal
        if scope["path"] not in GENERATE:
            await self._gateway.low_priority.step(caller.tenant)
        return None

    def _caller(self, scope: Scope) -> Caller:
        """Raises UnauthenticatedError, or ForbiddenError for a page of another origin."""
        if not self._gateway.keys.on:
            if scope["path"] not in OPEN:
                # Not the configured address: a router that listens on all is reached over loopback too.
                server = scope["server"]
                self._web_pages.check(scope["method"], scope["headers"], server[0] if server else "")
        elif scope["path"] not in self._open:
            return self._check(scope)
        return ANYONE

    def _check(self, scope: Scope) -> Caller:
        given, key = _only(scope, "Authorization"), _only(scope, "x-api-key").strip()
        if key:
            if given and not _is_bearer(given, key):
                raise UnauthenticatedError("x-api-key and Authorization are different", field="x-api-key")
            given = f"Bearer {key}"
        return self._gateway.keys.check(given)


def _only(scope: Scope, header: str) -> str:
    """The value of a header; "" = it is missing. Raises UnauthenticatedError if it is there more than once."""
    field = header.lower()
    given = [value for name, value in scope["headers"] if name == field.encode()]
    if len(given) > 1:
        raise UnauthenticatedError(f"there is more than one {header} header", field=field)
    return given[0].decode("latin-1") if given else ""


def _is_bearer(authorization: str, key: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and given.strip() == key


def caller_of(request: Request) -> Caller:
    """The caller that the gate has authenticated."""
    caller: Caller = request.scope.get(CALLER, ANYONE)
    return caller


def connection_of(request: Request) -> str:
    """A name of the connection, unique while it is open."""
    client = request.client
    return f"{client.host}:{client.port}" if client is not None else ""
