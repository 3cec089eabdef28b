"""Handlers of calls, which end a refused call with the status of its error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from cluster.errors import BatonError
from cluster.rpc import errors
from router.frontends.grpc.gate import Context
from router.frontends.grpc.write_deadline import metadata_written

Call = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


def generic_handler(service: str, *calls: Call) -> grpc.GenericRpcHandler[Any, Any]:
    """Serve these calls under their names.

    They read and write serialised messages, and are declared as streams of them, so that a single message is read only
    once its request holds a place. Clients see no difference.
    """
    handlers = {call.__name__: grpc.stream_stream_rpc_method_handler(refusing(call)) for call in calls}
    return grpc.method_handlers_generic_handler(service, handlers)


def refusing(call: Call) -> Any:
    """End a call that raises a BatonError with the error's status.

    grpc.aio keeps the exception of `abort` in the call's state until Python's garbage collector runs. It is therefore
    raised in a frame that holds nothing of the request: the frames of the original error hold its message, of megabytes.
    """

    async def answered(messages: AsyncIterator[bytes], context: Context) -> None:
        try:
            await call(messages, context)
            return
        except grpc.aio.InternalError:
            # A write failed, because the client has disconnected. grpc.aio would log the exception.
            raise asyncio.CancelledError from None
        except BatonError as error:
            refusal = error.with_traceback(None)
            refusal.__context__ = refusal.__cause__ = None
        try:
            await metadata_written()
            await errors.abort(context, refusal)
        except grpc.aio.InternalError:
            # The client disconnected while the status waited behind an answer that it did not read.
            raise asyncio.CancelledError from None

    return answered
