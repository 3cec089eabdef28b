"""Reads the messages of calls of gRPC's own services (health, reflection) within bounds.

Places and the budget for bodies bound Inference's messages; these services' calls take neither, and health asks for no
key. grpc.aio waits for a call's message without end, before any handler runs, and the connection of a call that waits is
not idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from cluster.errors import BatonError, DeadlineError, InvalidRequestError
from cluster.rpc import errors

# These messages have a few bytes. gRPC takes long ones as well, so only so many are read at a time, each in a short time.
READS = 32
READ_SECONDS = 1.0
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class OtherCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """`seconds`: limit between two messages of a stream, which ends it."""

    def __init__(self, own_service: str, seconds: float):
        self._own = f"/{own_service}/"
        self._seconds = seconds
        self._reads = asyncio.Semaphore(READS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._own):
            return handler
        call = self._stream(handler) if handler.request_streaming else self._single(handler)
        return grpc.stream_stream_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )

    def _single(self, handler: Handler) -> Any:
        """To the client a stream of one message is the same, and here it can be read."""
        call: Any = handler.unary_stream or handler.unary_unary

        async def single(_: AsyncIterator[Any], context: Context) -> None:
            try:
                message = await self._message(context)
            except BatonError as error:
                await errors.abort(context, error)
            answer = await call(message, context)
            if not handler.response_streaming:
                await context.write(answer)

        return single

    async def _message(self, context: Context) -> Any:
        try:
            async with asyncio.timeout(READ_SECONDS), self._reads:
                message = await context.read()
        except TimeoutError:
            late = f"the call's message did not come within {READ_SECONDS:g} s"
            raise DeadlineError(late, field="message", limit=f"{READ_SECONDS:g} s") from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("message: the call has none", field="message")
        return message

    def _stream(self, handler: Handler) -> Any:
        call: Any = handler.stream_stream

        async def in_time(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
            while True:
                try:
                    async with asyncio.timeout(self._seconds):
                        message = await anext(messages)
                except (TimeoutError, StopAsyncIteration):
                    return
                yield message

        async def stream(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for answer in call(in_time(aiter(messages)), context):
                yield answer

        return stream
