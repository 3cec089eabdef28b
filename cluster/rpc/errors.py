"""Typed errors over gRPC: the status carries the message, trailing metadata the ErrorDetail."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from cluster import errors
from wire import common_pb2

ERROR_KEY = "baton-error-bin"
STATUS_KEY = "grpc-status-details-bin"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.BatonError) -> NoReturn:
    """End the RPC with the error's status; the peer restores the error with `error_from_rpc`."""
    await context.abort(
        error.grpc_status, error.to_wire().message, trailing_metadata=trailing_metadata(error)
    )
    raise AssertionError("abort() raises")


def trailing_metadata(error: errors.BatonError) -> tuple[tuple[str, bytes], ...]:
    """Return the ErrorDetail, and google.rpc.RetryInfo where a later retry may help."""
    ours = (ERROR_KEY, error.to_wire().SerializeToString())
    if not error.retry_after_seconds:
        return (ours,)
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(round(error.retry_after_seconds * 1000))
    status = status_pb2.Status(code=error.grpc_status.value[0], message=error.to_wire().message)
    status.details.add().Pack(retry)
    return (ours, (STATUS_KEY, status.SerializeToString()))


_BY_STATUS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.ForbiddenError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
}


# Parts of gRPC's messages, the rest of which only says what OpenSSL did
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "is not in peer certificate")


def is_from_peer(error: grpc.RpcError) -> bool:
    """Whether the peer raised the error itself; otherwise the connection failed."""
    metadata: Any = getattr(error, "trailing_metadata", lambda: None)() or ()
    return any(key == ERROR_KEY for key, _ in metadata)


def error_from_rpc(error: grpc.RpcError) -> errors.BatonError:
    """Return the typed error of a failed RPC; without Baton's metadata, the nearest class of its status."""
    metadata: Any = getattr(error, "trailing_metadata", lambda: None)() or ()
    for key, value in metadata:
        if key == ERROR_KEY:
            with contextlib.suppress(DecodeError):
                raw = value if isinstance(value, bytes) else value.encode()
                return errors.from_wire(common_pb2.ErrorDetail.FromString(raw))
    status = getattr(error, "code", lambda: grpc.StatusCode.UNKNOWN)()
    details = getattr(error, "details", lambda: str(error))() or status.name
    if any(part in details for part in _UNTRUSTED):
        details = f"the server's certificate is not of a trusted authority, or is for another name: {details}"
    return _BY_STATUS.get(status, errors.InternalError)(details)
