"""Parses messages inside the call: grpc.aio answers malformed ones with an exception and a wrong status."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from cluster.errors import BatonError, InvalidRequestError
from cluster.rpc import errors

Context = grpc.aio.ServicerContext[Any, Any]
Parse = Callable[[bytes], Any]


class ParseInside(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends the call with INVALID_ARGUMENT at a malformed message; in a stream, after the messages before it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        if handler.request_streaming:
            return _streaming(handler)
        return _single(handler)


def _single(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    parse: Any = handler.request_deserializer
    write = handler.response_serializer
    call: Any = handler.unary_stream or handler.unary_unary

    async def unary(raw: bytes, context: Context) -> Any:
        return await call(await _parsed(parse, raw, context), context)

    async def stream(raw: bytes, context: Context) -> AsyncIterator[Any]:
        replies = call(await _parsed(parse, raw, context), context)
        if inspect.isawaitable(replies):  # gRPC's own health service writes to the context
            await replies
            return
        async for reply in replies:
            yield reply

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, None, write)
    return grpc.unary_unary_rpc_method_handler(unary, None, write)


def _streaming(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    parse: Any = handler.request_deserializer
    write = handler.response_serializer
    call: Any = handler.stream_stream

    async def messages(raw: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for one in raw:
            yield _parse(parse, one)

    async def stream(raw: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        async for reply in call(messages(raw), context):
            yield reply

    return grpc.stream_stream_rpc_method_handler(stream, None, write)


async def _parsed(parse: Parse, raw: bytes, context: Context) -> Any:
    try:
        return _parse(parse, raw)
    except BatonError as error:
        await errors.abort(context, error)


def _parse(parse: Parse, raw: bytes) -> Any:
    try:
        return parse(raw)
    except DecodeError as error:
        raise InvalidRequestError(f"the message is not valid protobuf: {error}", field="message") from None
