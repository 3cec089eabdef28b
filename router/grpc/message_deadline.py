"""A call's messages come in time. grpc.aio waits for the first one for ever, before any handler runs, and the connection
of a call that waits is not idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from cluster import rpc
from cluster.errors import DeadlineError, InvalidRequestError

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class MessageDeadline(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Of the only message of a call: DeadlineError. In a stream the next one just does not come."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        call = (
            _stream(handler, self._seconds) if handler.request_streaming else _single(handler, self._seconds)
        )
        return grpc.stream_stream_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )


def _single(handler: Handler, seconds: float) -> Any:
    """To the client a stream of one message is the same, and here it can be read."""
    call: Any = handler.unary_stream or handler.unary_unary

    async def single(_: AsyncIterator[Any], context: Context) -> None:
        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            late = f"the request's message did not come within {seconds:g} s"
            await rpc.abort(context, DeadlineError(late, field="message", limit=f"{seconds:g}"))
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            await rpc.abort(context, InvalidRequestError("there is no message", field="message"))
        answer = await call(message, context)
        if not handler.response_streaming:
            await context.write(answer)

    return single


def _stream(handler: Handler, seconds: float) -> Any:
    call: Any = handler.stream_stream

    async def in_time(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    message = await anext(messages)
            except (TimeoutError, StopAsyncIteration):
                return
            yield message

    async def stream(messages: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for answer in call(in_time(aiter(messages)), context):
            yield answer

    return stream
