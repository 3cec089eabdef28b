"""Bounds the reading of messages for gRPC's health service.

Its calls need no key, and take no place and nothing of the budget for bodies, which bound the messages of other services.
Without this, grpc.aio waits for a call's message without a time limit, and its connection does not count as idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc

from cluster.errors import BatonError, DeadlineError, InvalidRequestError, OverloadedError
from cluster.rpc import errors
from router.frontends.grpc.gate import Context

# These messages have a few bytes and arrive with the call, but gRPC accepts long ones. So only this many are read at a
# time, each within a short time. A further one ends the oldest: calls that send nothing must not delay others.
READS = 32
READ_SECONDS = 1.0
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class OtherCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Serves calls with one message. Handlers from stream to stream read their messages themselves, within limits."""

    def __init__(self) -> None:
        self._reads: dict[asyncio.Timeout, None] = {}  # under way, oldest first

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return grpc.stream_stream_rpc_method_handler(
            self._single(handler), handler.request_deserializer, handler.response_serializer
        )

    def _single(self, handler: Handler) -> Any:
        """Serve a call with one message as a stream, whose reading can be bounded. Clients see no difference."""
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
            late = f"the call's message did not arrive within {READ_SECONDS:g} s"
            raise DeadlineError(late, field="message", limit=f"{READ_SECONDS:g} s") from None
        finally:
            self._reads.pop(deadline, None)
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]
            raise InvalidRequestError("message: the call has none", field="message")
        return message

    def _end_oldest(self) -> None:
        oldest = next(iter(self._reads))
        if not oldest.expired():  # otherwise it is about to end
            del self._reads[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
