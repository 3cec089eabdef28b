"""Bounds the calls of gRPC's own services (health, reflection). Admission counts Inference's only, health asks for no key,
and a health watch lasts as long as its client likes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster import rpc
from cluster.errors import BatonError, DeadlineError, InvalidRequestError
from router.limits import Places

MAX_PER_CONNECTION = 4
# Their messages have a few bytes. gRPC takes long ones as well, so only so many are read at a time, each within a second.
READS = 32
READ_SECONDS = 1.0
Context = grpc.aio.ServicerContext[Any, Any]


class OtherCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, own_service: str):
        self._own = f"/{own_service}/"
        self._places = Places("connection")
        self._reads = asyncio.Semaphore(READS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        return self._bounded(handler)

    def _bounded(self, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Stream to stream serves every kind of call, and reads nothing before its place is taken."""
        call: Any = handler.stream_stream or handler.unary_stream or handler.unary_unary
        read: Any = handler.request_deserializer

        async def answer(messages: AsyncIterator[Any], context: Context) -> None:
            peer, taken = context.peer(), False
            try:
                self._places.take(peer, MAX_PER_CONNECTION)
                taken = True
                given = messages if handler.request_streaming else read(await self._message(context))
                answering = call(given, context)
                if inspect.isasyncgen(answering):
                    async for message in answering:
                        await context.write(message)
                elif (message := await answering) is not None:
                    await context.write(message)
            except BatonError as error:
                await rpc.abort(context, error)
            finally:
                if taken:
                    self._places.give_back(peer)

        forms = read if handler.request_streaming else None, handler.response_serializer
        return grpc.stream_stream_rpc_method_handler(answer, *forms)

    async def _message(self, context: Context) -> bytes:
        try:
            async with asyncio.timeout(READ_SECONDS), self._reads:
                raw = await context.read()
        except TimeoutError:
            text = f"the call's message did not come within {READ_SECONDS:g} s"
            raise DeadlineError(text, field="message", limit=f"{READ_SECONDS:g} s") from None
        if not isinstance(raw, bytes):
            raise InvalidRequestError("message: the call has none", field="message")
        return raw
