"""Authenticates every RPC before its message is read. Health checks need no key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster.errors import BatonError, UnauthenticatedError
from cluster.rpc import errors
from cluster.security.keys import ANYONE, Caller
from router.gateway import RequestGateway

Context = grpc.aio.ServicerContext[Any, Any]
OPEN = "/grpc.health.v1.Health/"


def caller_of(gateway: RequestGateway, context: Context) -> Caller:
    """Raises UnauthenticatedError if the router requires a key and the call has no valid one."""
    return _check(gateway, context.invocation_metadata()) if gateway.keys.on else ANYONE


def _check(gateway: RequestGateway, metadata: Any) -> Caller:
    given = [value for key, value in metadata or () if key == "authorization"]
    if len(given) > 1:
        raise UnauthenticatedError("there is more than one authorization entry", field="authorization")
    return gateway.keys.check(str(given[0]) if given else "")


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Installed if the router requires API keys. Refused calls get a handler that reads nothing."""

    def __init__(self, gateway: RequestGateway):
        self._gateway = gateway

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if not handler_call_details.method.startswith(OPEN):
            try:
                _check(self._gateway, handler_call_details.invocation_metadata)
            except BatonError as error:
                self._gateway.metrics.refused()
                return _refuse(error)
        return await continuation(handler_call_details)


def _refuse(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler from stream to stream serves every kind of call, and waits for no message."""

    async def refuse(request_iterator: AsyncIterator[bytes], context: Context) -> None:
        await errors.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
