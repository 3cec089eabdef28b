"""The role that a peer's certificate names: who may call what."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster.errors import ForbiddenError, UnauthenticatedError
from cluster.rpc import errors

WORKER_NAME = "worker.baton.internal"
ROUTER_NAME = "router.baton.internal"

Context = grpc.aio.ServicerContext[Any, Any]


class PeerNames(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Authorizes callers of a worker: workers may open the hand-off stream, routers may call everything else.

    The handshake has verified the authority; this checks the role, so that a certificate that the same authority issued
    for another purpose gives no access. A stream ends once its caller's certificate has expired.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc.health.v1."):
            return handler
        return _named(handler, WORKER_NAME if method.endswith("/Handoff") else ROUTER_NAME)


def _named(handler: grpc.RpcMethodHandler[Any, Any], name: str) -> grpc.RpcMethodHandler[Any, Any]:
    call: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
    forms = request, response = handler.request_deserializer, handler.response_serializer

    async def stream(given: Any, context: Context) -> AsyncIterator[Any]:
        await _check_name(context, name)
        ends = _certificate_ends(context)
        async with contextlib.aclosing(call(given, context)) as messages:
            async for message in messages:
                if time.time() >= ends:
                    await errors.abort(context, UnauthenticatedError("the caller's certificate has expired"))
                yield message

    async def unary(given: Any, context: Context) -> Any:
        await _check_name(context, name)
        return await call(given, context)

    if not handler.response_streaming:
        return grpc.unary_unary_rpc_method_handler(unary, *forms)
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, request, response)
    return grpc.unary_stream_rpc_method_handler(stream, request, response)


def names_of(transport: asyncio.BaseTransport) -> frozenset[str]:
    """The names in the certificate of a connection's peer; empty without TLS."""
    certificate = transport.get_extra_info("peercert") or {}
    return frozenset(str(name) for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")


async def _check_name(context: Context, name: str) -> None:
    names: Any = context.auth_context().get("x509_subject_alternative_name", ())
    if name.encode() not in names:
        await errors.abort(context, ForbiddenError(f"only a certificate of {name} may call this"))


def _certificate_ends(context: Context) -> float:
    """When the caller's certificate expires, in seconds since 1970."""
    from cryptography import x509  # here: `make gpu-check` does without the package

    (certificate,) = context.auth_context()["x509_pem_cert"]
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
    except ValueError:  # the handshake has accepted it; cryptography is stricter
        return math.inf
