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

from cluster.errors import BatonError, DeadlineError, InvalidRequestError, OverloadedError
from cluster.rpc import errors

# These messages have a few bytes, and come with the call. gRPC takes long ones as well, so only so many are read at a
# time, each in a short time. One more ends the oldest: calls that send nothing must not hold those up that do.
READS = 32
READ_SECONDS = 1.0
Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class OtherCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """`seconds`: limit between two messages of a stream, which ends it."""

    def __init__(self, own_service: str, seconds: float):
        self._own = f"/{own_service}/"
        self._seconds = seconds
        self._reads: dict[asyncio.Timeout, None] = {}  # under way, oldest first

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
        deadline = asyncio.timeout(READ_SECONDS)
        try:
            async with deadline:
                self._reads[deadline] = None
                if len(self._reads) > READS:
                    self._end_oldest()
                message = await context.read()
        except TimeoutError:
            if deadline not in self._reads:
                many = f"more than {READS} calls of these services had sent no message yet; try again"
                raise OverloadedError(many, field="message", limit=str(READS)) from None
            late = f"the call's message did not come within {READ_SECONDS:g} s"
            raise DeadlineError(late, field="message", limit=f"{READ_SECONDS:g} s") from None
        finally:
            self._reads.pop(deadline, None)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("message: the call has none", field="message")
        return message

    def _end_oldest(self) -> None:
        oldest = next(iter(self._reads))
        if not oldest.expired():  # else it is about to end
            del self._reads[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())

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
