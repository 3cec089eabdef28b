"""Typed errors over gRPC: the status carries the message, trailing metadata the ErrorDetail."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from cluster import errors
from wire import common_pb2

ERROR_KEY = "baton-error-bin"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.BatonError) -> NoReturn:
    """Ends the RPC with the error's status; the peer gets it back from `error_from_rpc`."""
    detail = error.to_wire().SerializeToString()
    await context.abort(error.grpc_status, error.message, trailing_metadata=((ERROR_KEY, detail),))
    raise AssertionError("abort() raises")


_BY_STATUS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
}


def error_from_rpc(error: grpc.RpcError) -> errors.BatonError:
    """The typed error behind a failed RPC; without our metadata, the nearest class of its status."""
    metadata: Any = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in metadata:
        if key == ERROR_KEY:
            detail = common_pb2.ErrorDetail()
            detail.ParseFromString(value if isinstance(value, bytes) else value.encode())
            return errors.from_wire(detail)
    status = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))() or status.name
    return _BY_STATUS.get(status, errors.InternalError)(details)
