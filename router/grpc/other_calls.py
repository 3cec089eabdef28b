"""Bounds the calls of gRPC's own services (health, reflection): admission counts Inference's only, and a health watch
lasts as long as its client likes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster import rpc
from cluster.errors import OverloadedError
from router.limits import Places

MAX_PER_CONNECTION = 4
Context = grpc.aio.ServicerContext[Any, Any]


class OtherCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, own_service: str, limit: int = MAX_PER_CONNECTION):
        self._own = f"/{own_service}/"
        self._limit = limit
        self._places = Places("connection")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        return self._counted(handler)

    def _counted(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        call: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
        forms = handler.request_deserializer, handler.response_serializer

        async def answer(given: Any, context: Context) -> Any:
            peer = context.peer()
            await self._take(peer, context)
            try:
                return await call(given, context)
            finally:
                self._places.give_back(peer)

        async def generate(given: Any, context: Context) -> AsyncIterator[Any]:
            peer = context.peer()
            await self._take(peer, context)
            try:
                async for message in call(given, context):
                    yield message
            finally:
                self._places.give_back(peer)

        if not handler.response_streaming:
            return grpc.unary_unary_rpc_method_handler(answer, *forms)
        stream = generate if inspect.isasyncgenfunction(call) else answer
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, *forms)
        return grpc.unary_stream_rpc_method_handler(stream, *forms)

    async def _take(self, peer: str, context: Context) -> None:
        try:
            self._places.take(peer, self._limit)
        except OverloadedError as error:
            await rpc.abort(context, error)
